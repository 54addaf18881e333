"""x"""


def doctor() -> None:
    """Doctor.

    Example: sharpen doctor
    """
    print("ok")
