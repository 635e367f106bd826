"""Operations that are traced in another form than that in which torch has them."""
