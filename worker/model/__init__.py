"""Contents of a model file: checked metadata, sizes, vocabulary and chat template."""
