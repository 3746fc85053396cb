//! Small worlds, each of which can be searched to its end.

use crate::database::Fate;
use crate::properties::{self, Event};

/// A transaction that enqueues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spec {
    /// The key of all its rows.
    pub key: u8,
    /// How many.
    pub rows: u8,
    /// How far it is before anything else happens: waiting, open with all its ids, or committed.
    pub first: Fate,
    /// It may roll back.
    pub may_roll_back: bool,
    /// It is a prepared transaction: a failover does not end it.
    pub prepared: bool,
}

/// What may still go wrong. Every field counts down.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Budget {
    /// Relay processes that are killed.
    pub crashes: u8,
    /// Relay processes that start while another one runs.
    pub take_overs: u8,
    /// EndTxn requests whose answer is late, so that they are sent again.
    pub late_ends: u8,
    /// TxnOffsetCommit requests of the same kind.
    pub late_offsets: u8,
    /// Transactions that are aborted and tried again.
    pub aborts: u8,
    /// Probes of the holders that fail.
    pub lost_probes: u8,
    /// Failovers of the database.
    pub fail_overs: u8,
}

/// What exists and what can happen.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// Its name.
    pub name: &'static str,
    /// The transactions, in the order in which they begin.
    pub writers: Vec<Spec>,
    /// Relay processes.
    pub relays: usize,
    /// Rows of each half of a look.
    pub limit: usize,
    /// Batches that exist at once.
    pub batches: usize,
    /// Whether the leader cleans up.
    pub cleans_up: bool,
    /// Messages that Kafka refuses until it is repaired.
    pub refused: Vec<u8>,
    /// What may go wrong.
    pub budget: Budget,
    /// What a search must come across with all rules, or it proves nothing.
    pub events: Vec<Event>,
}

impl Scenario {
    /// The messages of a writer, in the order of its rows.
    pub fn messages(&self, writer: usize) -> std::ops::Range<u8> {
        let first = self.writers[..writer].iter().map(|w| w.rows).sum();
        first..first + self.writers[writer].rows
    }

    /// Which writer a message belongs to.
    #[must_use]
    pub fn writer(&self, message: u8) -> usize {
        let mut writers = 0..self.writers.len();
        let found = writers.find(|w| self.messages(*w).contains(&message));
        found.unwrap_or_default()
    }

    /// The key of a message.
    #[must_use]
    pub fn key(&self, message: u8) -> u8 {
        self.writers[self.writer(message)].key
    }

    /// Whether a failover may lose the rollback of a prepared transaction.
    #[must_use]
    pub fn rolls_back_prepared(&self) -> bool {
        self.budget.fail_overs > 0 && self.writers.iter().any(|w| w.prepared)
    }

    fn of(name: &'static str, writers: &[Spec]) -> Self {
        Self {
            name,
            writers: writers.to_vec(),
            relays: 1,
            limit: 4,
            batches: 1,
            cleans_up: false,
            refused: Vec::new(),
            budget: Budget::default(),
            events: Vec::new(),
        }
    }

    /// Three transactions commit or roll back in any order; a relay reads, and crashes once.
    #[must_use]
    pub fn out_of_order() -> Self {
        Self {
            budget: Budget {
                crashes: 1,
                ..Budget::default()
            },
            events: vec![
                properties::GAP_BURNT,
                properties::LATE_ROW_PUBLISHED,
                properties::CRASHED_BEFORE_THE_MARK,
            ],
            ..Self::of("out of order", &[writer(0), writer(1), writer(0)])
        }
    }

    /// A bulk insert whose gap takes several looks, with a later transaction of the same key; a probe fails.
    #[must_use]
    pub fn cut_off() -> Self {
        let bulk = Spec {
            rows: 2,
            ..writer(0)
        };
        Self {
            budget: Budget {
                lost_probes: 1,
                ..Budget::default()
            },
            limit: 1,
            events: vec![properties::GAP_BURNT, properties::LATE_ROW_PUBLISHED],
            ..Self::of("cut off", &[bulk, writer(1), writer(0)])
        }
    }

    /// A batch is read while the one before commits; the relay crashes twice.
    #[must_use]
    pub fn read_ahead() -> Self {
        Self {
            budget: Budget {
                crashes: 2,
                ..Budget::default()
            },
            limit: 1,
            batches: 2,
            events: vec![properties::GAP_BURNT, properties::CRASHED_BEFORE_THE_MARK],
            ..Self::of("read ahead", &[writer(0), writer(1), ready(2)])
        }
    }

    /// Requests are answered too late, sent again, and arrive in a later transaction (V1).
    #[must_use]
    pub fn late_requests() -> Self {
        Self {
            budget: Budget {
                crashes: 1,
                late_ends: 1,
                late_offsets: 1,
                aborts: 1,
                ..Budget::default()
            },
            limit: 1,
            events: vec![properties::LATE_REQUEST_IS_FENCED],
            ..Self::of("late requests", &[ready(0), ready(1), ready(2)])
        }
    }

    /// Only the checkpoint is sent again.
    #[must_use]
    pub fn late_offsets() -> Self {
        let all = Self::late_requests();
        Self {
            name: "late offsets",
            budget: Budget {
                late_ends: 0,
                ..all.budget
            },
            ..all
        }
    }

    /// Two relays believe that they lead, and one crashes.
    #[must_use]
    pub fn two_leaders() -> Self {
        Self {
            budget: Budget {
                crashes: 1,
                take_overs: 2,
                ..Budget::default()
            },
            relays: 2,
            limit: 1,
            events: vec![properties::TWO_LEAD, properties::ZOMBIE_COMMITTED],
            ..Self::of("two leaders", &[ready(0), ready(1)])
        }
    }

    /// Rows are deleted behind the mark.
    #[must_use]
    pub fn clean_up() -> Self {
        Self {
            budget: Budget {
                crashes: 1,
                ..Budget::default()
            },
            limit: 1,
            batches: 2,
            cleans_up: true,
            events: vec![properties::CLEANED_UP, properties::CRASHED_BEFORE_THE_MARK],
            ..Self::of("clean-up", &[writer(0), writer(1), ready(2)])
        }
    }

    /// Kafka refuses two messages of different keys; the first blocks one of its key. They are released one by one.
    #[must_use]
    pub fn parking() -> Self {
        Self {
            budget: Budget {
                crashes: 2,
                ..Budget::default()
            },
            refused: vec![0, 1],
            limit: 2,
            events: vec![properties::RELEASED, properties::HALF_RELEASED],
            ..Self::of("parking", &[ready(0), ready(1), ready(0)])
        }
    }

    /// The same with a late row and two leaders.
    #[must_use]
    pub fn parking_by_two() -> Self {
        Self {
            budget: Budget {
                take_overs: 1,
                ..Budget::default()
            },
            relays: 2,
            refused: vec![0, 1],
            events: vec![properties::RELEASED, properties::TWO_LEAD],
            ..Self::of("parking by two", &[writer(0), ready(1)])
        }
    }

    /// A standby database that has fallen behind takes over: committed rows are lost, and ids are issued twice.
    #[must_use]
    pub fn lossy_failover() -> Self {
        Self {
            budget: Budget {
                fail_overs: 1,
                ..Budget::default()
            },
            limit: 1,
            batches: 2,
            events: vec![properties::STOPPED, properties::WENT_ON_AFTER_A_LOSS],
            ..Self::of("lossy failover", &[ready(0), writer(1), writer(2)])
        }
    }

    /// The same, and the lost transaction is the rollback of a prepared one, which comes back.
    #[must_use]
    pub fn revived() -> Self {
        let prepared = Spec {
            prepared: true,
            ..open(0)
        };
        let commits = Spec {
            may_roll_back: false,
            ..open(1)
        };
        Self {
            budget: Budget {
                fail_overs: 1,
                ..Budget::default()
            },
            events: vec![properties::STOPPED, properties::WENT_ON_AFTER_A_LOSS],
            ..Self::of("revived", &[prepared, commits, ready(2)])
        }
    }

    /// A failover loses a parked row.
    #[must_use]
    pub fn lost_parking() -> Self {
        Self {
            budget: Budget {
                fail_overs: 1,
                ..Budget::default()
            },
            refused: vec![0],
            events: vec![properties::STOPPED, properties::WENT_ON_AFTER_A_LOSS],
            ..Self::of("lost parking", &[ready(0), ready(1)])
        }
    }
}

fn writer(key: u8) -> Spec {
    Spec {
        key,
        rows: 1,
        first: Fate::Waiting,
        may_roll_back: true,
        prepared: false,
    }
}

fn ready(key: u8) -> Spec {
    Spec {
        first: Fate::Committed,
        ..writer(key)
    }
}

fn open(key: u8) -> Spec {
    Spec {
        first: Fate::Open,
        ..writer(key)
    }
}
