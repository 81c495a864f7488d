"""Text and token ids, without I/O but for loading.

    tokenizer.py          loading a tokenizer; transformers_import.py makes that fast
    words.py              words of a request to the ids that a model writes for them
    detokenizer.py        ids to text, as they arrive
    stop_sequences.py     where the text of an answer ends; stop_words.py finds words in an engine's output
    end_tokens.py         the tokens that end an output
    sampling_defaults.py  a model's own defaults of sampling
    chat.py               prompts by the chat template or by PROMPT_TEMPLATE
    template_probe.py     how a chat template is probed: for its forms (template_forms.py), and for the
                          conversations that it accepts (template_traits.py), to which conversation.py fits

May import ``errors``, ``processes`` and ``request``. After a change: pytest tests/unit/text
"""
