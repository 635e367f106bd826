"""Operations outside a traced step: run at once on the CPU, or deferred until the value is wanted."""
