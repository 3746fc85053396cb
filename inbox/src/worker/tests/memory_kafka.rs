//! A topic in memory and a feed that reads it: enough of Kafka for the worker, with the faults under the test's control.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use bytes::Bytes;
use oncebox_kafka::{ConsumerEvent, Error, Headers, Message};
use uuid::Uuid;

use crate::feed::Feed;
use crate::start::Facts;

/// A cluster with one topic.
#[derive(Clone)]
pub(super) struct MemoryKafka(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    topic: String,
    topic_id: String,
    partitions: BTreeMap<i32, Log>,
    /// Events that members have not polled yet.
    events: HashMap<usize, VecDeque<ConsumerEvent>>,
    members: usize,
    committed: HashMap<i32, i64>,
    stores: Vec<(i32, i64)>,
    closed: usize,
    markers: HashSet<(i32, i64)>,
    /// Partitions that a member has paused.
    paused: HashSet<i32>,
    /// The poll behind the next question about a partition takes long.
    slow: Slow,
    /// Added to every member's position at its next poll: redelivery.
    rewind: HashMap<usize, i64>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Slow {
    #[default]
    No,
    AfterTheQuestion,
    Now,
}

#[derive(Default)]
struct Log {
    low: i64,
    records: VecDeque<Message>,
}

impl Log {
    fn high(&self) -> i64 {
        self.low + self.records.len() as i64
    }
}

impl MemoryKafka {
    pub(super) fn new(topic: &str, partitions: i32) -> Self {
        Self(Arc::new(Mutex::new(State {
            topic: topic.to_owned(),
            topic_id: "topic-1".to_owned(),
            partitions: (0..partitions).map(|p| (p, Log::default())).collect(),
            ..State::default()
        })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    /// Appends a record with an envelope.
    pub(super) fn append(&self, partition: i32, id: Uuid, payload: &str) -> i64 {
        self.append_keyed(partition, id, "key", payload)
    }

    pub(super) fn append_keyed(&self, partition: i32, id: Uuid, key: &str, payload: &str) -> i64 {
        self.append_record(
            partition,
            key,
            payload,
            &[
                ("oncebox-v", "1"),
                ("oncebox-id", &id.to_string()),
                ("oncebox-source", "shop"),
                ("oncebox-epoch", "1"),
                ("oncebox-outbox-id", "7"),
                ("oncebox-created-at", "2026-11-29T20:21:53.123456Z"),
                ("oncebox-type", "order.paid"),
            ],
        )
    }

    pub(super) fn append_raw(
        &self,
        partition: i32,
        payload: &str,
        headers: &[(&str, &str)],
    ) -> i64 {
        self.append_record(partition, "key", payload, headers)
    }

    /// Appends what takes an offset and is no message.
    pub(super) fn marker(&self, partition: i32) {
        let offset = self.append_record(partition, "", "", &[]);
        let mut state = self.state();
        state.markers.insert((partition, offset));
    }

    fn append_record(
        &self,
        partition: i32,
        key: &str,
        payload: &str,
        headers: &[(&str, &str)],
    ) -> i64 {
        let headers = headers
            .iter()
            .map(|(name, value)| (*name, Some(value.as_bytes())));
        let mut state = self.state();
        let topic: Arc<str> = state.topic.as_str().into();
        let log = state.partitions.get_mut(&partition).unwrap();
        let offset = log.high();
        log.records.push_back(Message {
            topic,
            partition,
            offset,
            timestamp_ms: 1_700_000_000_000 + offset,
            key: Some(Bytes::from(key.to_owned())),
            payload: Some(Bytes::from(payload.to_owned())),
            headers: Headers::from_iter(headers),
        });
        offset
    }

    /// Deletes records below `low` (retention).
    pub(super) fn expire(&self, partition: i32, low: i64) {
        let mut state = self.state();
        let log = state.partitions.get_mut(&partition).unwrap();
        while log.low < low {
            log.records.pop_front();
            log.low += 1;
        }
    }

    /// Deletes the topic and creates it again, empty.
    pub(super) fn recreate(&self) {
        let mut state = self.state();
        state.topic_id = "topic-2".to_owned();
        for log in state.partitions.values_mut() {
            *log = Log::default();
        }
    }

    pub(super) fn set_committed(&self, partition: i32, offset: i64) {
        self.state().committed.insert(partition, offset);
    }

    pub(super) fn committed(&self, partition: i32) -> Option<i64> {
        self.state().committed.get(&partition).copied()
    }

    /// Every call of `store`, in order.
    pub(super) fn stores(&self) -> Vec<(i32, i64)> {
        self.state().stores.clone()
    }

    pub(super) fn is_paused(&self, partition: i32) -> bool {
        self.state().paused.contains(&partition)
    }

    pub(super) fn closed(&self) -> usize {
        self.state().closed
    }

    /// The poll that follows the next question about a partition takes long, and brings what is there at its end.
    pub(super) fn be_slow_after_the_question(&self) {
        self.state().slow = Slow::AfterTheQuestion;
    }

    /// Whether that poll is under way.
    pub(super) fn is_slow(&self) -> bool {
        self.state().slow == Slow::Now
    }

    /// A new member, with nothing assigned.
    pub(super) fn join(&self) -> MemoryFeed {
        let mut state = self.state();
        state.members += 1;
        let member = state.members;
        drop(state);
        MemoryFeed {
            kafka: self.clone(),
            member,
            positions: BTreeMap::new(),
            paused: HashSet::new(),
            stored: BTreeMap::new(),
            ends: BTreeMap::new(),
        }
    }

    /// Tells a member that it has these partitions.
    pub(super) fn assign(&self, member: usize, partitions: &[i32]) {
        self.event(member, partitions, ConsumerEvent::Assigned);
    }

    /// Tells a member that it has these partitions no more.
    pub(super) fn revoke(&self, member: usize, partitions: &[i32]) {
        self.event(member, partitions, ConsumerEvent::Revoked);
    }

    fn event(
        &self,
        member: usize,
        partitions: &[i32],
        event: impl Fn(Vec<(String, i32)>) -> ConsumerEvent,
    ) {
        let mut state = self.state();
        let names = partitions
            .iter()
            .map(|p| (state.topic.clone(), *p))
            .collect();
        state
            .events
            .entry(member)
            .or_default()
            .push_back(event(names));
    }

    /// Delivers the last `count` records of every partition of a member again.
    pub(super) fn redeliver(&self, member: usize, count: i64) {
        self.state().rewind.insert(member, count);
    }
}

/// One member of the group.
pub(super) struct MemoryFeed {
    kafka: MemoryKafka,
    pub(super) member: usize,
    positions: BTreeMap<i32, i64>,
    paused: HashSet<i32>,
    stored: BTreeMap<i32, i64>,
    /// The ends that were reported.
    ends: BTreeMap<i32, i64>,
}

impl MemoryFeed {
    fn next(&mut self) -> Option<ConsumerEvent> {
        let mut state = self.kafka.state();
        if let Some(event) = state.events.entry(self.member).or_default().pop_front() {
            if let ConsumerEvent::Revoked(revoked) = &event {
                for (_, partition) in revoked {
                    self.positions.remove(partition);
                    self.stored.remove(partition);
                }
            }
            return Some(event);
        }
        if let Some(count) = state.rewind.remove(&self.member) {
            for position in self.positions.values_mut() {
                *position = (*position - count).max(0);
            }
        }
        let State {
            partitions, topic, ..
        } = &*state;
        for (partition, position) in &mut self.positions {
            if self.paused.contains(partition) {
                continue;
            }
            let log = &partitions[partition];
            if *position < log.low || *position > log.high() {
                let event = ConsumerEvent::OutOfRange {
                    topic: topic.clone(),
                    partition: *partition,
                    offset: Some(*position),
                    reason: "out of range".to_owned(),
                };
                self.paused.insert(*partition);
                return Some(event);
            }
            while let Some(message) = log.records.get((*position - log.low) as usize) {
                *position += 1;
                if state.markers.contains(&(*partition, message.offset)) {
                    continue;
                }
                return Some(ConsumerEvent::Message(message.clone()));
            }
            if self.ends.insert(*partition, *position) != Some(*position) {
                return Some(ConsumerEvent::End {
                    topic: topic.as_str().into(),
                    partition: *partition,
                    offset: *position,
                });
            }
        }
        None
    }
}

impl Feed for MemoryFeed {
    fn poll(&mut self, timeout: Duration) -> Option<ConsumerEvent> {
        if self.kafka.is_slow() {
            std::thread::sleep(Duration::from_millis(300));
            self.kafka.state().slow = Slow::No;
        }
        let until = Instant::now() + timeout;
        loop {
            let event = self.next();
            if event.is_some() || Instant::now() >= until {
                return event;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn start(&mut self, partitions: &[(String, i32, i64)]) -> Result<(), Error> {
        self.positions
            .extend(partitions.iter().map(|(_, p, at)| (*p, *at)));
        Ok(())
    }

    fn pause(&mut self, partitions: &[(String, i32)]) -> Result<(), Error> {
        let partitions = partitions.iter().map(|(_, p)| *p);
        self.paused.extend(partitions.clone());
        self.kafka.state().paused.extend(partitions);
        Ok(())
    }

    fn resume(&mut self, partitions: &[(String, i32)]) -> Result<(), Error> {
        for (_, partition) in partitions {
            self.paused.remove(partition);
            self.kafka.state().paused.remove(partition);
        }
        Ok(())
    }

    fn store(&mut self, _topic: &str, partition: i32, next: i64) -> Result<(), Error> {
        self.stored.insert(partition, next);
        self.kafka.state().stores.push((partition, next));
        Ok(())
    }

    fn commit(&mut self) -> Result<(), Error> {
        let mut state = self.kafka.state();
        state.committed.extend(&self.stored);
        Ok(())
    }

    fn facts(&mut self, _topic: &str, partition: i32) -> Result<Option<Facts>, Error> {
        let mut state = self.kafka.state();
        if state.slow == Slow::AfterTheQuestion {
            state.slow = Slow::Now;
        }
        let log = &state.partitions[&partition];
        Ok(Some(Facts {
            topic_id: state.topic_id.clone(),
            low: log.low,
            high: log.high(),
            committed: state.committed.get(&partition).copied(),
        }))
    }

    fn close(mut self) {
        self.commit().unwrap();
        self.kafka.state().closed += 1;
    }
}
