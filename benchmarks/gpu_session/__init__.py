"""Session on a machine with a GPU: tests and measurements in resumable slices, for `scripts/gpu_session`.

`jobs` lists what is run, `session` runs it job by job and keeps the state, `measure` is the program of one job, `page`
writes the tables. Only `measure` and what it imports need torch and packages that are not in Python's standard library.
"""
