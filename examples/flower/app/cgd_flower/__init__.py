"""A Flower app that starts and observes a training with cgd; see docs/flower.md."""
