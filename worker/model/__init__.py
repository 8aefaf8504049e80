"""What a model file says: checked metadata, sizes, vocabulary and chat template."""
