"""Objects in remote storage, through fsspec: S3, Google Cloud Storage, the Hugging Face Hub, HTTP, any known protocol.

object_url                  the URL of an object, and its text without credentials
object_version              which version of an object was seen: what its store says about it
object_store                ask about an object, read ranges of it, list a pattern
request_retries             which failures are worth another request, how many, and the pauses between them
http_connections            one range over HTTP, from a socket straight into the caller's buffer
conditional_range_requests  one range of an object bound to one version: by http_connections, or by fsspec's own call
remote_errors               what went wrong, in plain words, without credentials
"""
