"""Gradients averaged over ranks while the backward pass runs; `reducer.GradientReducer` is the way in."""
