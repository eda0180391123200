"""Recipes name whole runs; building, fitting, evaluating and acting put the rooms together for them."""
