"""Parts of benchmarks that are no script."""
