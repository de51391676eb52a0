"""One trial: the sharded engine, the engines beside it, ranks on Ray, and measurement.

All but the Ray runner import the standard library and torch alone. Importing `executor` itself imports neither torch nor ray.
"""
