//! A small set of small numbers: ids, messages or writers. The model's fingerprint of a set is the set itself.

use std::fmt;

/// Numbers from 0 to 15.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Set(u16);

impl Set {
    /// With `n` in it.
    #[must_use]
    pub fn with(self, n: u8) -> Self {
        Self(self.0 | 1 << n)
    }

    /// Without `n`.
    #[must_use]
    pub fn without(self, n: u8) -> Self {
        Self(self.0 & !(1 << n))
    }

    /// What is in one of both.
    #[must_use]
    pub fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// What is not in `other`.
    #[must_use]
    pub fn minus(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Whether `n` is in it.
    #[must_use]
    pub fn contains(self, n: u8) -> bool {
        self.0 & 1 << n != 0
    }

    /// Whether both have nothing in common.
    #[must_use]
    pub fn is_disjoint(self, other: Self) -> bool {
        self.0 & other.0 == 0
    }

    /// Whether nothing is in it.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// How many are in it: the count without the fingerprint.
    #[must_use]
    pub fn len(self) -> u32 {
        self.0.count_ones()
    }

    /// The numbers, ascending.
    pub fn iter(self) -> impl Iterator<Item = u8> {
        (0..16).filter(move |n| self.contains(*n))
    }

    /// The largest.
    #[must_use]
    pub fn last(self) -> Option<u8> {
        self.iter().last()
    }
}

impl FromIterator<u8> for Set {
    fn from_iter<I: IntoIterator<Item = u8>>(numbers: I) -> Self {
        numbers.into_iter().fold(Self::default(), Self::with)
    }
}

impl fmt::Debug for Set {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}
