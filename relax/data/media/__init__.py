"""Images, audio clips and videos of rows: from what a row says to numpy arrays.

    row --- rows.py, source.py ---> Prompt.media (kind, source), messages with a part for each
    Prompt --- pool.py: workers decode it, once, ahead of need ---> Image, Audio, Video in shared memory

Where the bytes are is checked when rows are read: inside the data's roots or nowhere. What is wrong with them shows when they
are decoded, as a `DataError` that names row, item and reason.
"""
