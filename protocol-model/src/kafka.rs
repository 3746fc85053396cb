//! Kafka as a transactional producer of protocol V1 meets it (§4).

use crate::position::Checkpoint;

/// A request that its sender has given up and sent again, still on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Late {
    /// The producer's epoch when it was sent.
    pub producer: u8,
    /// What it asks for.
    pub request: Request,
}

/// What a late request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Request {
    /// EndTxn(commit).
    Commit,
    /// EndTxn(abort).
    Abort,
    /// TxnOffsetCommit.
    Offsets(Checkpoint),
}

/// The open transaction, as the brokers know it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Transaction {
    /// Messages.
    pub records: Vec<u8>,
    /// The checkpoint, when it was sent.
    pub checkpoint: Option<Checkpoint>,
}

/// Refused: the producer is fenced, or its transaction was ended by somebody else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refused;

/// The brokers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Kafka {
    /// The producer epoch of the transactional id: older producers are fenced.
    pub producer: u8,
    /// What a `read_committed` reader has seen.
    pub log: Vec<u8>,
    /// The committed checkpoint.
    pub checkpoint: Option<Checkpoint>,
    /// The open transaction.
    pub open: Option<Transaction>,
    /// The transaction before was aborted.
    pub aborted: bool,
    /// Requests that are still on their way.
    pub late: Vec<Late>,
}

impl Kafka {
    /// `init_transactions`: fences the zombie and settles its open transaction.
    pub fn fence(&mut self) -> u8 {
        self.open = None;
        self.producer += 1;
        self.producer
    }

    /// Produce. Under V1 it opens a transaction if there is none.
    ///
    /// # Errors
    /// When the producer is fenced.
    pub fn append(&mut self, producer: u8, records: &[u8]) -> Result<(), Refused> {
        self.check(producer)?;
        self.open
            .get_or_insert_default()
            .records
            .extend_from_slice(records);
        Ok(())
    }

    /// AddOffsets and TxnOffsetCommit. Under V1 they open a transaction if there is none: nobody notices that a late
    /// abort took the records away.
    ///
    /// # Errors
    /// When the producer is fenced.
    pub fn send_offsets(&mut self, producer: u8, checkpoint: Checkpoint) -> Result<(), Refused> {
        self.check(producer)?;
        self.open.get_or_insert_default().checkpoint = Some(checkpoint);
        Ok(())
    }

    /// EndTxn. One that repeats the end before it is answered with OK.
    ///
    /// # Errors
    /// When the producer is fenced, or wants to commit what was aborted.
    pub fn end(&mut self, producer: u8, commit: bool) -> Result<(), Refused> {
        self.check(producer)?;
        let Some(transaction) = self.open.take() else {
            return if commit == self.aborted {
                Err(Refused)
            } else {
                Ok(())
            };
        };
        self.aborted = !commit;
        if commit {
            self.log.extend(transaction.records);
            self.checkpoint = transaction.checkpoint.or(self.checkpoint);
        }
        Ok(())
    }

    /// A whole transaction of which nobody sees the inside.
    ///
    /// # Errors
    /// When the producer is fenced.
    pub fn commit(
        &mut self,
        producer: u8,
        records: &[u8],
        checkpoint: Checkpoint,
    ) -> Result<(), Refused> {
        self.append(producer, records)?;
        self.send_offsets(producer, checkpoint)?;
        self.end(producer, true)
    }

    /// A late request arrives: measured effects on brokers that verify transactional writes. It changes the open
    /// transaction of the same producer epoch, whichever that is; nothing is told to the producer.
    pub fn deliver(&mut self, late: usize) {
        let Late { producer, request } = self.late.remove(late);
        match request {
            _ if producer != self.producer || self.open.is_none() => {}
            Request::Commit => _ = self.end(producer, true),
            Request::Abort => _ = self.end(producer, false),
            Request::Offsets(checkpoint) => {
                if let Some(Transaction {
                    checkpoint: Some(stored),
                    ..
                }) = &mut self.open
                {
                    *stored = checkpoint;
                }
            }
        }
    }

    fn check(&self, producer: u8) -> Result<(), Refused> {
        match producer == self.producer {
            true => Ok(()),
            false => Err(Refused),
        }
    }
}
