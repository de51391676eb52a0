"""Jobs as runs of experiment trackers: Weights & Biases, MLflow, TensorBoard, and plug-ins."""
