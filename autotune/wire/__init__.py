"""The answers of the REST service: one declaration of each, shared by the service (`api`) and its Python client.

The service sends each field of a class under its name as JSON: a mapping as an object, a tuple as an array, a time in ISO 8601,
None and a number that is not finite as null. A field that was added after the first release has a default: the service always
sends the field, and a client takes the default if an older service does not.
"""
