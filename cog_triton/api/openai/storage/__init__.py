"""What the API server keeps in one SQLite file: responses, files and batches.

    storage.py       Storage: the stores of one application over one journal
    responses.py     ResponseStore: responses, and the log of those that run in the background
    files.py         FileStore: uploads, and the files that batches write
    batches.py       BatchStore: batches, and the answers to their lines
    journal.py       Journal: grouped writes and concurrent reads; when the file cannot be used
    database.py      one connection in a thread of its own, transactions, typed rows
    schema.py        the tables, and how files of earlier versions get them
    limits.py        what one API key may store
    records.py       the records of a background response
    lease.py         which process runs a background response or a batch
    housekeeping.py  deletes what is too old or too much
    clock.py         the time by which rows expire

A statement stands beside the method that runs it. Rows are frozen dataclasses. May import nothing of the
API server but ``background_tasks``. After a change: pytest tests/unit/api/openai/test_storage_*.py
tests/unit/api/openai/test_journal.py tests/integration/test_openai_store.py
"""
