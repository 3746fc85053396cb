//! The rules of the protocol that can be taken away, each by its name.

/// One rule. Without it the checker finds a schedule that breaks a guarantee.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Rule {
    /// §4: a producer that had a request without an answer, or sent its EndTxn twice, is made anew. Otherwise the late
    /// request ends or changes the next transaction.
    Taint,
    /// §2, step 1: the holders that may burn a gap are read **before** the rows.
    HoldersBeforeRows,
    /// §2, step 4: the holders of a new hole are read **after** the rows.
    HoldersAfterRows,
    /// §2, step 3: a look that was cut off burns only below the last id it returned.
    BurnBelowTheCut,
    /// §2, step 3: a gap without recorded holders is never burnt.
    BurnOnlyWithHolders,
    /// §2, step 2: while the look at the gaps is cut off, the new rows wait.
    NewRowsWaitForLateOnes,
    /// §2: whenever a position is loaded, its gaps take the holders of now. Otherwise none, as if nobody could fill them.
    HoldersOfNow,
    /// §2: the checkpoint of a batch is the position fixed when it was read, not the reader's live one.
    ImmutableCheckpoint,
    /// §2: a new database session throws read position and read-ahead batches away.
    NewSessionForgets,
    /// §3, start, step 3: the position is read after the zombie was fenced.
    FenceBeforePosition,
    /// §3, start, step 4: of checkpoint and mark, the larger seq wins, not the larger number.
    LargerSeq,
    /// §3: clean-up stays behind the mark, that is behind what Kafka is known to have committed.
    CleanUpBehindTheMark,
    /// §3: every write of the leader checks its epoch.
    WritesCheckTheEpoch,
    /// §3: the identity check compares fingerprints, not only counts.
    Fingerprints,
    /// §3: the identity check is repeated when the holders of the start have ended.
    CheckAgainAfterHolders,
    /// §3: the holders of the start are read **before** the snapshot of the identity check.
    StartHoldersBeforeCheck,
    /// §4: a row is parked before a checkpoint passes it.
    ParkBeforeCheckpoint,
    /// §4: only rows that the acknowledged position has settled are released.
    ReleaseOnlySettled,
    /// §4: the DELETE of a release takes exactly the released ids, not a range.
    ReleaseNamesIds,
    /// §4: a start finishes the release that its checkpoint names.
    StartFinishesRelease,
}

/// Which rules hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    missing: Option<Rule>,
}

impl Rules {
    /// The protocol as it is.
    #[must_use]
    pub fn all() -> Self {
        Self { missing: None }
    }

    /// Every rule but this one.
    #[must_use]
    pub fn without(rule: Rule) -> Self {
        Self {
            missing: Some(rule),
        }
    }

    /// Whether this rule holds.
    #[must_use]
    pub fn hold(self, rule: Rule) -> bool {
        self.missing != Some(rule)
    }
}
