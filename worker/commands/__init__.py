"""The commands of `nightmill` that the worker brings: where each is, and the first sentence of its help.

Named by the entry point `nightmill.commands`; read at each start of the command, so it imports nothing.
"""

COMMANDS = {
    "benchmark": (
        "nightmill.worker.commands.benchmark:benchmark",
        "Check that this machine's GPU computes right, and measure how fast, in about five minutes.",
    ),
    "check": (
        "nightmill.worker.commands.check:check",
        "Test the database, the broker, the model file and the GPU, and say what to do about each.",
    ),
    "demo": (
        "nightmill.worker.commands.demo:demo",
        "Answer questions with a small model, through the whole path, on this machine.",
    ),
    "embed": (
        "nightmill.worker.commands.embed:embed",
        "Compute the embedding of a column of FILE for each row, and write it beside the other columns.",
    ),
    "models": (
        "nightmill.worker.commands.models:models",
        "Say which models are in the cache, what they are, and whether they fit this machine's GPU.",
    ),
    "plan": (
        "nightmill.worker.commands.plan:plan",
        "Say what a batch file asks for, which rows are bad, and when it will be done.",
    ),
    "pull": (
        "nightmill.worker.commands.models:pull",
        "Fetch the model NAME into the cache, and print where it lies.",
    ),
    "run": (
        "nightmill.worker.commands.run:run",
        "Generate for every row of FILE, and write the results to OUTPUT.",
    ),
    "try": (
        "nightmill.worker.commands.trying:try_command",
        "Run some rows of FILE at random, and show their answers, before all of them.",
    ),
    "worker": (
        "nightmill.worker.commands.serving:worker",
        "Serve a model: take jobs from the queue, generate, write the results.",
    ),
}
