"""NVIDIA's small clients: token ids to the engine's model and back, past the ensemble.

    options.py         the options that they share
    engine.py          a connection to the model tensorrt_llm, its inputs, and the ids that it answers with
    client.py          one text
    identity_test.py   a batch of random prompts, timed
    gen_input_data.py  random prompts for perf_analyzer

After a change: pytest tests/integration/test_small_clients.py
"""
