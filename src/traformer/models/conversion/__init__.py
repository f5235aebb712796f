"""Hugging Face decoders of other families with an attention of ours: what `traformer.convert` makes."""
