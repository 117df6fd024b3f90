"""Callbacks that switch between the weights being trained and the averaged ones in the trainers of other packages."""
