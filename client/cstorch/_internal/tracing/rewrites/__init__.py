"""Operations that are traced in another form than torch's."""
