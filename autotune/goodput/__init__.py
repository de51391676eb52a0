"""Time to the end of a run on a cluster whose nodes fail: closed form, and the choice of how to recover."""
