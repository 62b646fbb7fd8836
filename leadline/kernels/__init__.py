"""Every operation of the forward: one contract each in ``ops``, one meaning in ``reference``."""
