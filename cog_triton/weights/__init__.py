"""Gets a model's files from wherever they are: a directory, a tar file, a URL, Hugging Face.

What is downloaded is complete or absent. What Hugging Face has goes into its own cache, where
``transformers`` and ``hf`` find it as well.

URLs may carry secrets, in a password or a signature. Messages, logs and files have them without
(``display_url``); only ``pget``, which knows no other way, gets one on its command line.

    source.py        what a source is, and fetch(): the way of each kind
    hub.py           Hugging Face
    cache.py         a tar file → its files in the cache, or those that are there already
    record.py        what the cache knows about its files, as JSON
    version.py       what tells one version of a file from another
    download.py      a URL → a file: what is asked for, what an answer means, the tries
    partial.py       a download under way
    http_source.py   the HTTP client, its errors and its logs
    pget.py          a faster download, if it is installed
    progress.py      the progress bar
    tar.py           unpacks a tar file that is whole
    layout.py        which members of a tar file are safe
    files.py         what is in a file or a directory
    disk_space.py    a full disk
    fetch_errors.py  errors between these modules
"""

from cog_triton.weights.source import fetch

__all__ = ["fetch"]
