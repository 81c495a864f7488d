"""Gets a model's files from wherever they are: a directory, a tar file, a URL, Hugging Face.

What is downloaded is complete or absent. What Hugging Face has goes into its own cache, where
``transformers`` and ``hf`` find it as well.

URLs may carry secrets, in a password or a signature. Messages, logs and files have them without
(``display_url``); only ``pget``, which knows no other way, gets one on its command line.

    source.py        fetch(), which knows the kinds of sources
    hub.py           Hugging Face
    cache.py         a tar file to its files in the cache
    download.py      a URL to a file: requests, answers, tries
    partial.py       a download under way
    version.py       versions of a file
    tar.py           unpacks a tar file that is whole and safe
    files.py         files, records of them, full disks

May import ``errors`` and ``processes``. After a change: pytest tests/unit/weights
"""

from cog_triton.weights.source import fetch

__all__ = ["fetch"]
