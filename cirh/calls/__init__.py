"""Operations as prepared torch calls."""
