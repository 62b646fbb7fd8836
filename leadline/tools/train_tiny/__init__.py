"""Training of the bundled model: data, a differentiable V4.1, the trainer and the export."""
