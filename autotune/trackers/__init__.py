"""Jobs as runs of experiment trackers: Weights & Biases, MLflow, TensorBoard, Aim, and plug-ins."""
