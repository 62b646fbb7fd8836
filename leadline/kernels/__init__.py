"""Operations of the forward: contracts in ``ops``, meanings in ``reference``, and kernels."""
