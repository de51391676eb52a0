"""Which machines a job runs on: this one, a Ray cluster, what is known of it."""
