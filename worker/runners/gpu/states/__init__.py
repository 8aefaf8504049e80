"""Launchers of `cuda/states/`: layers that mix tokens by a state of fixed size (`worker.model.states`)."""
