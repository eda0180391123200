"""Reinforcement learning: episodes, their schedule and stored state, advantages, objectives."""
