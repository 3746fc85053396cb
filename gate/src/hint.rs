//! What may sit in front of the database: the trait, its scope, and several hints as one.

use std::fmt::Debug;
use std::sync::Arc;

use futures_util::future::{BoxFuture, FutureExt as _};
use uuid::Uuid;

/// Whose messages an id is asked for. The same id in another scope is another message.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Scope {
    /// The history of the database that holds the marks: what changes when a database is restored, promoted or replaced.
    pub epoch: Arc<str>,
    /// The consumer's name, as in the marks of the database.
    pub consumer: Arc<str>,
}

impl Scope {
    /// A scope of this database epoch and this consumer.
    pub fn new(epoch: impl Into<Arc<str>>, consumer: impl Into<Arc<str>>) -> Self {
        Self {
            epoch: epoch.into(),
            consumer: consumer.into(),
        }
    }
}

/// Remembers which messages are known to be settled, so that the inbox need not open a transaction for each of them.
///
/// A hint may be lost, emptied or unreachable at any time. That costs speed, never correctness, because of how both sides
/// use it (G5):
///
/// * *The hint* says `true` only for an id that [`settled`](Self::settled) named. A miss, an error, a time-out, a mark of
///   another epoch: all of that is `false`. It never fails and never waits longer than its own limit.
/// * *The inbox* calls [`settled`](Self::settled) only after the `COMMIT` is known to have succeeded, and takes `true` for a
///   reason to look, not for an answer: it skips the message when one indexed read finds the mark, and the same statement
///   shows the position row as it wrote it last. Otherwise the message goes through the transaction. A replay of a dead
///   letter asks no hint.
pub trait Hint: Send + Sync + Debug + 'static {
    /// Which of these ids are known to be committed, in their order: as many answers as there are ids.
    ///
    /// # Cancel safety
    ///
    /// The future may be dropped at any time.
    fn known<'a>(&'a self, scope: &'a Scope, ids: &'a [Uuid]) -> BoxFuture<'a, Vec<bool>>;

    /// These ids are committed: call it after the `COMMIT`, never before.
    ///
    /// # Cancel safety
    ///
    /// The future may be dropped at any time; some of the ids are remembered then.
    fn settled<'a>(&'a self, scope: &'a Scope, ids: &'a [Uuid]) -> BoxFuture<'a, ()>;

    /// Forgets these ids: the database did not have a mark that was hinted at, or an operator took it away.
    ///
    /// # Cancel safety
    ///
    /// The future may be dropped at any time; some of the ids are forgotten then.
    fn forget<'a>(&'a self, scope: &'a Scope, ids: &'a [Uuid]) -> BoxFuture<'a, ()>;

    /// Forgets everything of the scope: the database lost commits, or somebody else owned a partition meanwhile.
    ///
    /// # Cancel safety
    ///
    /// The future may be dropped at any time; the scope is forgotten or not.
    fn clear<'a>(&'a self, scope: &'a Scope) -> BoxFuture<'a, ()>;
}

/// Several hints as one: each is asked only for what those before it do not know.
///
/// ```
/// # fn example(near: std::sync::Arc<dyn oncebox_gate::Hint>, far: std::sync::Arc<dyn oncebox_gate::Hint>) {
/// use oncebox_gate::Chain;
///
/// let hint = Chain::new(vec![near, far]); // the process's own cache first, Redis for the rest
/// # let _ = hint; }
/// ```
#[derive(Debug, Clone)]
pub struct Chain(Arc<[Arc<dyn Hint>]>);

impl Chain {
    /// Asks them in this order.
    #[must_use]
    pub fn new(hints: Vec<Arc<dyn Hint>>) -> Self {
        Self(hints.into())
    }

    async fn ask(&self, scope: &Scope, ids: &[Uuid]) -> Vec<bool> {
        let mut known = vec![false; ids.len()];
        for hint in self.0.iter() {
            let open: Vec<usize> = (0..ids.len()).filter(|at| !known[*at]).collect();
            if open.is_empty() {
                break;
            }
            let asked: Vec<Uuid> = open.iter().map(|at| ids[*at]).collect();
            let answers = hint.known(scope, &asked).await;
            for (at, answer) in open.into_iter().zip(answers) {
                known[at] = answer;
            }
        }
        known
    }
}

impl Hint for Chain {
    fn known<'a>(&'a self, scope: &'a Scope, ids: &'a [Uuid]) -> BoxFuture<'a, Vec<bool>> {
        self.ask(scope, ids).boxed()
    }

    fn settled<'a>(&'a self, scope: &'a Scope, ids: &'a [Uuid]) -> BoxFuture<'a, ()> {
        async move {
            for hint in self.0.iter() {
                hint.settled(scope, ids).await;
            }
        }
        .boxed()
    }

    fn forget<'a>(&'a self, scope: &'a Scope, ids: &'a [Uuid]) -> BoxFuture<'a, ()> {
        async move {
            for hint in self.0.iter() {
                hint.forget(scope, ids).await;
            }
        }
        .boxed()
    }

    fn clear<'a>(&'a self, scope: &'a Scope) -> BoxFuture<'a, ()> {
        async move {
            for hint in self.0.iter() {
                hint.clear(scope).await;
            }
        }
        .boxed()
    }
}
