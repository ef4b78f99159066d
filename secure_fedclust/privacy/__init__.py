"""Protection, and nothing about clustering."""

from secure_fedclust.privacy.spec import PrivacySpec

__all__ = ["PrivacySpec"]
