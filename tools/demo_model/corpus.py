"""What the demo model knows: questions, each with the one answer it is trained to give.

The answers serve as documentation and as test data at once. Some hold accented letters, Chinese,
Japanese or emoji of several code points, so that the bytes of a single character are spread over
several tokens and a detokenizer that decodes token by token is caught. Two are long enough to watch
them stream.

    >>> from tools.demo_model.corpus import PAIRS
    >>> PAIRS[0].question
    'What is machine learning?'
"""

from __future__ import annotations

from typing import NamedTuple


class QA(NamedTuple):
    """A question and its answer, both plain text without surrounding white space."""

    question: str
    answer: str


_MACHINE_LEARNING = (
    QA(
        "What is machine learning?",
        "Machine learning is a way of building programs that find patterns in examples instead of "
        "following rules written by hand. A model with adjustable parameters is trained on data "
        "until its predictions are good enough, and is then applied to inputs it has never seen.",
    ),
    QA(
        "What is deep learning?",
        "Deep learning is machine learning with neural networks of many layers. Each layer turns "
        "its input into a slightly more abstract representation, and all of them are trained "
        "together.",
    ),
    QA(
        "What is a neural network?",
        "A neural network is a function made of simple layers, each a matrix multiplication "
        "followed by a nonlinear step. Its weights are learned from data.",
    ),
    QA(
        "What is gradient descent?",
        "Gradient descent lowers a loss step by step: it computes how the loss changes with every "
        "weight, then moves each weight a little in the direction that reduces it.",
    ),
    QA(
        "What is backpropagation?",
        "Backpropagation computes the gradient of a loss with respect to every weight. It applies "
        "the chain rule from the last layer back to the first and reuses intermediate results on "
        "the way.",
    ),
    QA(
        "What is overfitting?",
        "A model overfits when it remembers its training examples rather than what they have in "
        "common. It then does well on the training data and poorly on new data. This demo model "
        "is an extreme case, and on purpose.",
    ),
    QA(
        "What is supervised learning?",
        "In supervised learning every training example comes with the right answer, and the model "
        "learns to predict that answer from the input.",
    ),
    QA(
        "What is reinforcement learning?",
        "In reinforcement learning an agent acts in an environment and receives rewards. It learns "
        "a policy, a rule for choosing actions, that makes the total reward large.",
    ),
    QA(
        "What is a transformer?",
        "A transformer is a neural network that processes a sequence with layers of attention and "
        "feed-forward blocks. It handles all positions of a prompt in parallel, which suits GPUs "
        "well.",
    ),
    QA(
        "What is attention?",
        "Attention lets each position of a sequence gather information from other positions. Every "
        "position compares its query with the keys of the others and takes a weighted average of "
        "their values.",
    ),
    QA(
        "What is a large language model?",
        "A large language model is a neural network with billions of weights that predicts the "
        "next token of a text. Generating text means predicting one token, appending it, and "
        "predicting again.",
    ),
    QA(
        "What is an embedding?",
        "An embedding is a vector that stands for a token, a sentence or an image. Things with "
        "similar meaning get vectors that lie close together.",
    ),
    QA(
        "What is fine-tuning?",
        "Fine-tuning continues the training of an existing model on a smaller, more specific data "
        "set. It needs far less data and time than training from scratch.",
    ),
    QA(
        "What is LoRA?",
        "LoRA is a method of fine-tuning that leaves the original weights untouched. It learns two "
        "small matrices per layer, and their product is added to the layer's weight matrix.",
    ),
)

_TOKENS_AND_TEXT = (
    QA(
        "What is a token?",
        "A token is the unit of text a language model reads and writes: a word, a piece of a word, "
        "or even a single byte. Common words are one token, rare ones are several.",
    ),
    QA(
        "What is byte-pair encoding?",
        "Byte-pair encoding builds a vocabulary by starting from single bytes and merging the most "
        "frequent pair of neighbours again and again. Any text can be encoded, since every byte "
        "is in the vocabulary.",
    ),
    QA(
        "Why is streaming text hard?",
        "A token may end in the middle of a character. The two bytes of é, the three of 語 or the "
        "four of 🚀 can arrive in different tokens, so a server has to hold bytes back until they "
        "form whole characters.",
    ),
    QA(
        "How do you say machine learning in Chinese?",
        "In Chinese, machine learning is 机器学习. 机器 means machine and 学习 means learning.",
    ),
    QA(
        "How do you say machine learning in Japanese?",
        "In Japanese, machine learning is 機械学習, read きかいがくしゅう.",
    ),
    QA(
        "What is artificial intelligence in Chinese?",
        "人工智能是研究如何让计算机完成需要智力的任务的学科。机器学习是其中最重要的方法之一。",
    ),
    QA(
        "What is a language model in Japanese?",
        "言語モデルは、文章の次に来る単語を予測するモデルです。大量のテキストから学習します。",
    ),
    QA(
        "What is machine learning in French?",
        "L'apprentissage automatique, c'est l'étude d'algorithmes qui s'améliorent grâce à des "
        "données. Le modèle entraîné prédit ensuite des résultats inédits.",
    ),
    QA(
        "What is machine learning in German?",
        "Maschinelles Lernen heißt, dass ein Programm Regeln nicht vorgegeben bekommt, sondern "
        "aus Beispielen schließt. Für gute Ergebnisse müssen genügend Daten verfügbar sein.",
    ),
    QA(
        "What is machine learning in Spanish?",
        "El aprendizaje automático enseña a un programa con ejemplos. Con imágenes etiquetadas "
        "aprende, por ejemplo, a distinguir una piña de una montaña.",
    ),
    QA(
        "Which emoji are made of several code points?",
        "Flags are two code points, as in 🇯🇵 and 🇧🇷. Families such as 👨‍👩‍👧‍👦 are people joined "
        "by zero-width joiners, a skin tone follows its base as in 👍🏽, and ❤️ ends in a variation "
        "selector.",
    ),
    QA(
        "Answer only with emoji: how does a rocket launch go?",
        "👩‍🚀🚀🔥☁️🌍🛰️🌕🎉",
    ),
    QA(
        "Say hello in several languages.",
        "Hello! ¡Buenos días! Grüß Gott! Olá! Čau! Привет! 你好！こんにちは！안녕하세요! 👋🏾",
    ),
)

_SAMPLING = (
    QA(
        "What is greedy decoding?",
        "Greedy decoding always takes the most likely next token. The same prompt gives the same "
        "text every time.",
    ),
    QA(
        "What does temperature do?",
        "The logits are divided by the temperature before the softmax. Below 1 the likely tokens "
        "become likelier, above 1 the choice becomes more random, and close to 0 it is greedy.",
    ),
    QA(
        "What is top-k sampling?",
        "Top-k sampling draws the next token from the k most likely ones and ignores the rest. "
        "With k = 1 it is greedy decoding.",
    ),
    QA(
        "What is top-p sampling?",
        "Top-p sampling, also called nucleus sampling, keeps the smallest set of tokens whose "
        "probabilities add up to at least p, and draws the next token from that set.",
    ),
    QA(
        "What is a stop sequence?",
        "A stop sequence is a text that ends the generation as soon as it appears in the output. "
        "It may span several tokens, so the server has to look at text and not just at token ids.",
    ),
    QA(
        "What is a random seed for?",
        "A seed fixes the starting state of the random number generator. With the same seed, the "
        "same prompt and the same parameters, sampling usually gives the same text again.",
    ),
    QA(
        "What is an end-of-sequence token?",
        "It is a special token with which the model says that the text is complete. The server "
        "stops there and does not show it.",
    ),
)

_SERVING = (
    QA(
        "What is Triton Inference Server?",
        "Triton Inference Server is an open-source server from NVIDIA that runs models of many "
        "frameworks behind one HTTP and gRPC interface. It loads them from a model repository and "
        "can batch and schedule their requests.",
    ),
    QA(
        "What is TensorRT-LLM?",
        "TensorRT-LLM is NVIDIA's library for running large language models on its GPUs. It has "
        "fused kernels, quantization, a paged KV cache and in-flight batching.",
    ),
    QA(
        "What is in-flight batching?",
        "In-flight batching, also called continuous batching, decides after every step which "
        "requests are in the batch. A finished request leaves at once and a waiting one takes its "
        "place, so short answers never wait for long ones.",
    ),
    QA(
        "What is a KV cache?",
        "A KV cache keeps the attention keys and values of all earlier tokens. Each new token then "
        "needs only its own keys and values, at the cost of memory that grows with the length of "
        "the text.",
    ),
    QA(
        "What is a paged KV cache?",
        "A paged KV cache is split into blocks of a fixed number of tokens that are handed out on "
        "demand. Little memory is wasted, and requests with the same prefix can share blocks.",
    ),
    QA(
        "What is time to first token?",
        "Time to first token, or TTFT, is how long a client waits until the first piece of the "
        "answer arrives. It consists of queueing, tokenization and the processing of the prompt.",
    ),
    QA(
        "What are prefill and decode?",
        "Prefill processes all tokens of the prompt at once and is limited by arithmetic. Decode "
        "produces one token per step and is limited by how fast the weights can be read from "
        "memory.",
    ),
    QA(
        "What is the difference between latency and throughput?",
        "Latency is how long one request takes, throughput is how many tokens or requests are "
        "finished per second. Larger batches raise throughput and usually raise latency as well.",
    ),
    QA(
        "What is quantization?",
        "Quantization stores weights, and sometimes activations, with fewer bits, for example FP8 "
        "or INT4 instead of FP16. The model needs less memory and decodes faster, and it may lose "
        "some accuracy.",
    ),
    QA(
        "What is speculative decoding?",
        "In speculative decoding a cheap draft model proposes a few tokens and the large model "
        "checks them all in one step. The accepted tokens come almost for free.",
    ),
    QA(
        "What is tensor parallelism?",
        "Tensor parallelism splits the weight matrices of each layer over several GPUs. Every GPU "
        "computes a part of each layer, and the parts are combined by a collective operation.",
    ),
    QA(
        "What is a Triton ensemble?",
        "An ensemble is a Triton model without code of its own. Its configuration connects the "
        "outputs of some models to the inputs of others, so a client sends one request for the "
        "whole pipeline.",
    ),
    QA(
        "What is a decoupled model?",
        "A decoupled model may send any number of responses to one request. Triton needs this to "
        "stream text token by token.",
    ),
)

_THIS_PROJECT = (
    QA(
        "What is cog-triton?",
        "cog-triton is a Cog predictor that runs Triton Inference Server with TensorRT-LLM as a "
        "subprocess. You talk to it as to any Cog model, and Triton does the work.",
    ),
    QA(
        "What is Cog?",
        "Cog packages a machine learning model in a container. A Python class describes its inputs "
        "and outputs, and Cog builds the image and serves predictions over HTTP.",
    ),
    QA(
        "How do I run a prediction?",
        'Run `cog predict -i prompt="What is machine learning?"` in the project directory. Or '
        "start the server and send a POST request to /predictions with the prompt as input.",
    ),
    QA(
        "Which models form the ensemble?",
        "There are three: preprocessing turns text into token ids, tensorrt_llm generates new "
        "token ids, and postprocessing turns them back into text.",
    ),
    QA(
        "Why does tritonserver run as a subprocess?",
        "Triton is a program of its own, and a crash in it must not take the predictor down. The "
        "predictor starts tritonserver, waits until it is ready, watches it, and stops it at the "
        "end.",
    ),
    QA(
        "Can I use cog-triton without a GPU?",
        "Yes. On a machine without a GPU an embedded engine takes TensorRT-LLM's place inside Triton "
        "and runs a tiny model on the CPU, so the whole path from request to streamed text can be "
        "tried.",
    ),
    QA(
        "What is the embedded engine?",
        "The embedded engine fills the tensorrt_llm slot of the ensemble where TensorRT-LLM cannot "
        "run. It runs a model with the transformers library and batches requests in flight, which "
        "is fine for tests and demos and slow for large models.",
    ),
    QA(
        "What is the simulated engine?",
        "The simulated engine needs no model at all. It makes tokens of a fixed text at a set pace, "
        "so that everything around an engine can be tested and measured.",
    ),
    QA(
        "Who are you?",
        "I am the demo model of cog-triton, a tiny transformer that knows a few dozen questions by "
        "heart. Ask me anything else and I will make something up. 🤖",
    ),
    QA(
        "Explain in detail how a request travels through cog-triton.",
        "A client sends a prompt and its sampling parameters in a POST request to /predictions. "
        "Cog checks them against the declared inputs and calls the predictor.\n\n"
        "The predictor puts the prompt into the prompt template, rejects values that make no "
        "sense, and sends one request for the ensemble to tritonserver, the subprocess it started "
        "during setup.\n\n"
        "Inside Triton the request passes through three models. First, preprocessing turns the "
        "text into token ids. Second, tensorrt_llm adds the request to the running batch, "
        "processes the prompt in one pass, and then produces one token per step. Third, "
        "postprocessing turns new token ids back into text for clients that want text.\n\n"
        "The predictor wants the ids. It decodes them itself, holds back incomplete characters and "
        "anything that may be the start of a stop sequence, and yields the rest to Cog, which "
        "passes it on to the client. When the model emits its end-of-sequence token or the limit "
        "on new tokens is reached, the stream ends.",
    ),
    QA(
        "Explain in detail how a language model generates text.",
        "Generation begins with a prompt. The tokenizer cuts it into tokens and replaces each of "
        "them by a number.\n\n"
        "1. Prefill: the model reads all tokens of the prompt at once. Every layer computes keys "
        "and values for each position and stores them in the KV cache.\n"
        "2. Logits: the last position yields one score for each entry of the vocabulary.\n"
        "3. Sampling: temperature, top-k and top-p reshape these scores into a distribution, and "
        "the next token is drawn from it. Greedy decoding simply takes the highest score.\n"
        "4. Decode: the new token is fed back, the cache grows by one position, and the model "
        "yields the next scores.\n\n"
        "Steps 3 and 4 repeat until the end-of-sequence token is drawn, a stop sequence appears, "
        "or the token limit is reached. The tokenizer turns the new tokens back into text, and a "
        "streaming server sends that text in small pieces as it becomes available.",
    ),
)

PAIRS: tuple[QA, ...] = _MACHINE_LEARNING + _TOKENS_AND_TEXT + _SAMPLING + _SERVING + _THIS_PROJECT
