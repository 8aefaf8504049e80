"""Work out what a batch file asks of a worker, and how long that takes: all that `nightmill plan` says.

survey     reads and tokenises every row, and keeps a random sample
measure    runs the sample on the engine: the speed, and how long answers get
playing    from both to the time of the whole file
"""
