//! How a duplicate is known.

/// How a consumer knows a duplicate. In every mode the position row in the database fences zombies and says where to go on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dedup {
    /// By a mark (consumer, message id) that is kept for one window from first sight: catches every duplicate, also those
    /// that come from another producer or lie at another offset. The default.
    #[default]
    ById,
    /// By the position row alone: catches every redelivery, but not a message that lies in the topic twice. For topics that
    /// are written by the relay (or another exactly-once producer). One lane per partition; no row per message.
    ByOffset,
    /// By nothing but the position: what lies in the topic twice is handled twice, and so is a message above a hole (of a slower
    /// lane) after a crash. For handlers that are idempotent by nature, for example "set the price to
    /// 5": same input, same state, no counter, no mail.
    None,
}

impl Dedup {
    /// Whether messages have marks.
    pub(crate) fn marks(self) -> bool {
        self == Self::ById
    }
}
