"""The demo: a pretrained language model whose KV cache travels through the host tier.

``models`` finds and loads the two pretrained models, ``corpus`` gives the long text, ``generate`` prefills
and decodes, ``pages`` cuts a cache into pages and builds a cache from pages. Torch and transformers are
imported only when a model is loaded, so that importing this package stays cheap.
"""
