"""What is asked: model, cluster, workload, space, engine and objective, declared once for every entry point."""
