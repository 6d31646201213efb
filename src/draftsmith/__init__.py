"""draftsmith: trains DFlash drafters.  The flow is generate -> tokenize -> train -> evaluate -> export."""

__version__ = "0.1.0"
