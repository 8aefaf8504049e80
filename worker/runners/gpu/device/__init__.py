"""The GPU as such: its memory and errors, kernels compiled and loaded, graphs, what launchers are given."""
