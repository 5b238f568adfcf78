"""Differential privacy: the budget, integer Gaussian noise, and the noisy encoding of a member's addend."""
