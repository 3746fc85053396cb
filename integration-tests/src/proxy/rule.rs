//! What shall happen to which frames.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Semaphore, mpsc, watch};

use super::Cut;
use super::frame::Answer;
use crate::cable::{Guard, Open};

/// Direction of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Request,
    Response,
}

/// What happens to a frame that a rule matches.
#[derive(Clone, Copy, Debug)]
pub(super) enum Action {
    Hold,
    Drop,
    Delay(Duration),
    Duplicate,
    Cut,
}

/// The rules of one proxy and what it has seen.
#[derive(Debug, Default)]
pub(super) struct Rules {
    rules: Mutex<Vec<Arc<RuleState>>>,
    requests: Mutex<HashMap<i16, usize>>,
    cut: Mutex<Cut>,
    open: Open,
}

impl Rules {
    /// Counts the frame and finds the rule that takes it, if any: the oldest one that is not used up.
    pub(super) fn matching(
        &self,
        side: Side,
        api_key: i16,
        frame: &[u8],
    ) -> Option<Arc<RuleState>> {
        if side == Side::Request {
            *lock(&self.requests).entry(api_key).or_default() += 1;
        }
        lock(&self.rules)
            .iter()
            .find(|rule| rule.takes(side, api_key, frame))
            .cloned()
    }

    /// A token for a new connection, and its place in the count.
    pub(super) fn connection(&self) -> (Cut, Guard) {
        (lock(&self.cut).child_token(), self.open.guard())
    }

    /// Returns how many connections there were.
    pub(super) fn cut_all(&self) -> usize {
        let open = self.open.count();
        std::mem::take(&mut *lock(&self.cut)).cancel();
        open
    }

    pub(super) fn clear(&self) {
        lock(&self.rules).clear();
    }

    pub(super) fn requests(&self, api_key: i16) -> usize {
        lock(&self.requests).get(&api_key).copied().unwrap_or(0)
    }
}

/// One rule, seen from the connections.
#[derive(Debug)]
pub(super) struct RuleState {
    side: Side,
    api_key: i16,
    /// Only frames with this text.
    text: Option<String>,
    pub(super) action: Action,
    /// Matching frames still to be passed, then matching frames still to be taken.
    budget: Mutex<(usize, usize)>,
    hits: watch::Sender<usize>,
    /// One permit per released frame.
    releases: Semaphore,
    answers: mpsc::UnboundedSender<Option<Answer>>,
}

impl RuleState {
    fn takes(&self, side: Side, api_key: i16, frame: &[u8]) -> bool {
        if self.side != side || self.api_key != api_key {
            return false;
        }
        let contains = |text: &String| {
            frame
                .windows(text.len())
                .any(|part| part == text.as_bytes())
        };
        if !self.text.as_ref().is_none_or(contains) {
            return false;
        }
        let mut budget = lock(&self.budget);
        if budget.0 > 0 {
            budget.0 -= 1;
            return false;
        }
        if budget.1 == 0 {
            return false;
        }
        budget.1 -= 1;
        self.hits.send_modify(|hits| *hits += 1);
        true
    }

    /// A frame of a connection is being held.
    pub(super) fn held(self: Arc<Self>) -> Held {
        Held {
            rule: self,
            answer: None,
        }
    }
}

/// A held frame. [`Rule::release`] learns what became of it when this goes, also when its connection ends first.
#[derive(Debug)]
pub(super) struct Held {
    rule: Arc<RuleState>,
    answer: Option<Answer>,
}

impl Held {
    /// Waits for [`Rule::release`], or for the end of the rule.
    pub(super) async fn released(&self) {
        if let Ok(permit) = self.rule.releases.acquire().await {
            permit.forget();
        }
    }

    /// The frame has arrived, and this is the answer.
    pub(super) fn answered(mut self, answer: Option<Answer>) {
        self.answer = answer;
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let _ = self.rule.answers.send(self.answer.take());
    }
}

/// A rule in the making: which frames. Ends with what to do to them.
#[derive(Debug)]
#[must_use]
pub struct RuleBuilder<'a> {
    rules: &'a Rules,
    side: Side,
    api_key: i16,
    text: Option<String>,
    skip: usize,
    times: usize,
}

impl<'a> RuleBuilder<'a> {
    pub(super) fn new(rules: &'a Rules, side: Side, api_key: i16) -> Self {
        Self {
            rules,
            side,
            api_key,
            text: None,
            skip: 0,
            times: 1,
        }
    }

    /// Takes only frames that contain this text, not empty: a topic's name, for instance. Defaults to all.
    pub fn containing(mut self, text: impl Into<String>) -> Self {
        self.text = Some(text.into());
        self
    }

    /// Lets the next `n` matching frames pass. Defaults to 0.
    pub fn skip(mut self, n: usize) -> Self {
        self.skip = n;
        self
    }

    /// Takes `n` matching frames, not just one. Defaults to 1.
    pub fn times(mut self, n: usize) -> Self {
        self.times = n;
        self
    }

    /// Takes every matching frame from now on.
    pub fn always(self) -> Self {
        self.times(usize::MAX)
    }

    /// Keeps the frame until [`Rule::release`]; later frames of the same connection and direction wait behind it. The
    /// way on stays open for it even when the sender gives up and disconnects.
    pub fn hold(self) -> Rule {
        self.build(Action::Hold)
    }

    /// Swallows the frame; the connection lives.
    pub fn drop_frame(self) -> Rule {
        self.build(Action::Drop)
    }

    /// Passes it on later; later frames of the same connection and direction wait behind it.
    pub fn delay(self, by: Duration) -> Rule {
        self.build(Action::Delay(by))
    }

    /// A request: sends it twice, and swallows the second response. A response: the same as passing it on.
    pub fn duplicate(self) -> Rule {
        self.build(Action::Duplicate)
    }

    /// Cuts the connection instead of passing the frame on. On a request: it never happened. On a response: it
    /// happened, and the client does not know.
    pub fn cut(self) -> Rule {
        self.build(Action::Cut)
    }

    fn build(self, action: Action) -> Rule {
        let (answers, answered) = mpsc::unbounded_channel();
        let state = Arc::new(RuleState {
            side: self.side,
            api_key: self.api_key,
            text: self.text,
            action,
            budget: Mutex::new((self.skip, self.times)),
            hits: watch::Sender::new(0),
            releases: Semaphore::new(0),
            answers,
        });
        lock(&self.rules.rules).push(Arc::clone(&state));
        Rule {
            state,
            answered: tokio::sync::Mutex::new(answered),
        }
    }
}

/// A rule in force. It stays in force when the value is dropped, except that held frames are let go.
#[derive(Debug)]
pub struct Rule {
    state: Arc<RuleState>,
    answered: tokio::sync::Mutex<mpsc::UnboundedReceiver<Option<Answer>>>,
}

impl Rule {
    /// How many frames it has taken.
    pub fn hits(&self) -> usize {
        *self.state.hits.borrow()
    }

    /// Waits until it has taken a frame.
    ///
    /// # Panics
    /// Not within 60 s.
    pub async fn hit(&self) {
        self.hit_times(1).await;
    }

    /// Waits until it has taken `n` frames.
    ///
    /// # Panics
    /// Not within 60 s.
    pub async fn hit_times(&self, n: usize) {
        assert!(
            self.hit_within(n, Duration::from_secs(60)).await,
            "the rule for api key {} was hit {} times, not {n}",
            self.state.api_key,
            self.hits()
        );
    }

    /// Waits until it has taken `n` frames; `false` when that does not happen within `patience`.
    pub async fn hit_within(&self, n: usize, patience: Duration) -> bool {
        let mut hits = self.state.hits.subscribe();
        let waiting = hits.wait_for(|hits| *hits >= n);
        tokio::time::timeout(patience, waiting).await.is_ok()
    }

    /// Passes the held frame (one of them) on. For a request: waits for the broker's answer, which also goes to the
    /// client if it is still there; `None` when the broker closed the connection instead. For a response: that response.
    pub async fn release(&self) -> Option<Answer> {
        self.state.releases.add_permits(1);
        self.answered.lock().await.recv().await.flatten()
    }
}

impl Drop for Rule {
    fn drop(&mut self) {
        self.state.releases.close();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
