"""What several folders of tests share: servers, model files, oracles, engines."""
