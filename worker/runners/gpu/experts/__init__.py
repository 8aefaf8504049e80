"""Mixtures of experts: who goes where, the products of experts, and what becomes of their outputs."""
