"""Weights: the name of a model to a local directory of its files, complete or absent.

    cache.py       fetch(): directories, tar files, URLs and Hugging Face ids; the cache of tar files
    gguf.py        a GGUF file, converted once to a directory as any other
    gguf_details.py  what such a file says and transformers does not read
    managed.py     the weights that Cog mounts, by cog.yaml and weights.lock
    download.py    the file of a URL, resumed after a lost connection
    hub.py         repositories of Hugging Face, in its own cache

URLs may carry secrets, in a password or a signature. Messages, logs and files show them without
(``display_url``); only ``pget`` gets one whole, on its command line.

May import ``errors``, ``redaction`` and ``processes``. After a change: pytest tests/unit/weights
tests/compute/test_gguf.py
"""
