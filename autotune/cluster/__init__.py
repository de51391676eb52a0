"""The machines that a job runs on: this machine or a Ray cluster, and the facts about them."""
