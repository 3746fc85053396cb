//! Sessions of the fake database: each call is a transaction that may happen or not, and be reported or not.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;
use uuid::Uuid;

use super::database::{Parked, broken};
use super::world::{Process, SELF, World};
use crate::config::Config;
use crate::error::Error;
use crate::position::{Checkpoint, Gaps};
use crate::session::{
    Among, Cause, Facts, Filter, Limit, Look, Mark, Overview, ParkedRow, Parking, ParkingSession,
    Paused, Probe, Request, Rewrite, Row, Server, Session, Written, keys_of,
};

/// A connection.
pub(super) struct FakeSession {
    process: Arc<Process>,
    number: u64,
    server: Server,
}

impl FakeSession {
    /// One transaction of the server: at one moment, or never; reported or not.
    async fn call<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut World) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let number = self.number;
        let (there, back, fails, forgets) = {
            let mut world = self.process.world();
            let there = if world.fault(0.2) {
                // A host that does not answer for longer than the deadline of a statement.
                world.count("database calls out of time");
                world.quiet_at = Instant::now() + Duration::from_secs(50);
                Duration::from_secs(40)
            } else {
                world.hop()
            };
            (there, world.hop(), world.fault(1.5), world.fault(1.5))
        };
        let alive = move |world: &World| world.tables.sessions.contains(&number);
        let work = move |world: &mut World| {
            if fails {
                world.count("database calls failed");
                world.tables.sessions.remove(&number);
            }
            if !alive(world) {
                return Err(broken("connection closed"));
            }
            let answer = work(world);
            if forgets {
                world.count("database answers lost");
                world.tables.sessions.remove(&number);
            }
            answer
        };
        let answer = self.process.ask(there, back, work).await;
        if !alive(&self.process.world()) {
            return Err(broken("connection closed"));
        }
        answer
    }

    /// A write in a transaction that holds the mark's row, if it still has this epoch.
    async fn lead(
        &mut self,
        epoch: i64,
        work: impl FnOnce(&mut World) -> Result<(), Error> + Send + 'static,
    ) -> Result<Written, Error> {
        let led = self.call(move |world| {
            let led = world.tables.renew(epoch);
            if led {
                work(world)?;
            }
            Ok(led)
        });
        if led.await? {
            return Ok(Written::Done);
        }
        self.process.world().count("writes of a deposed leader");
        self.written(0, epoch, i64::MAX).await
    }
}

impl Session for FakeSession {
    const GAPLESS: bool = false;

    async fn connect(_: &Config) -> Result<Self, Error> {
        let process = SELF.with(Arc::clone);
        let (there, back, fails) = {
            let mut world = process.world();
            (world.hop(), world.hop(), world.fault(10.0))
        };
        let connect = move |world: &mut World| {
            if fails {
                return Err(broken("connection refused"));
            }
            let tables = &mut world.tables;
            tables.opened += 1;
            tables.sessions.insert(tables.opened);
            Ok((tables.opened, tables.server()))
        };
        let (number, server) = process.ask(there, back, connect).await?;
        Ok(Self {
            process,
            number,
            server,
        })
    }

    fn server(&self) -> &Server {
        &self.server
    }

    async fn mark(&mut self) -> Result<Mark, Error> {
        self.call(|world| Ok(world.tables.mark())).await
    }

    async fn probe(&mut self) -> Result<Probe, Error> {
        self.call(|world| {
            Ok(Probe {
                holders: world.tables.writers.holders(),
                last_id: world.tables.writers.next_id,
            })
        })
        .await
    }

    async fn look(&mut self, gaps: &Gaps, high: i64, limit: Limit) -> Result<Look, Error> {
        let gaps = gaps.clone();
        self.call(move |world| world.tables.look(&gaps, high, limit))
            .await
    }

    async fn last_visible(&mut self) -> Result<i64, Error> {
        self.call(|world| {
            let last = world.tables.outbox.last_key_value();
            Ok(last.map_or(0, |(id, _)| *id))
        })
        .await
    }

    async fn row_at_or_below(&mut self, id: i64) -> Result<Option<(i64, Uuid)>, Error> {
        self.call(move |world| {
            let last = world.tables.outbox.range(..=id).next_back();
            Ok(last.map(|(id, row)| (*id, row.message_id)))
        })
        .await
    }

    async fn facts(&mut self, high: i64, gaps: &Gaps, released: &Gaps) -> Result<Facts, Error> {
        let (gaps, released) = (gaps.clone(), released.clone());
        self.call(move |world| Ok(world.tables.facts(high, &gaps, &released)))
            .await
    }

    async fn take(
        &mut self,
        seen: &Mark,
        epoch: i64,
        source: &str,
        owner: &str,
    ) -> Result<bool, Error> {
        let (seen, source, owner) = (
            (seen.epoch, seen.renewal),
            source.to_owned(),
            owner.to_owned(),
        );
        let process = self.process.number;
        self.call(move |world| {
            let mark = &mut world.tables.mark;
            if (mark.epoch, mark.renewal) != seen {
                return Ok(false);
            }
            let over = mark.owner.as_ref().is_some_and(|other| *other != owner);
            mark.epoch = epoch;
            mark.renewal += 1;
            (mark.source, mark.owner) = (Some(source), Some(owner));
            world.count("terms");
            if world.history.failed_over {
                world.history.fresh.insert((process, epoch));
            }
            if over {
                world.count("take-overs");
            }
            world.note(format_args!("process {process} takes epoch {epoch}"));
            Ok(true)
        })
        .await
    }

    async fn renew(&mut self, epoch: i64) -> Result<Written, Error> {
        let rows = self.call(move |world| Ok(u64::from(world.tables.renew(epoch))));
        let rows = rows.await?;
        self.written(rows, epoch, 0).await
    }

    async fn confirm(
        &mut self,
        epoch: i64,
        checkpoint: &Checkpoint,
        cluster_id: &str,
    ) -> Result<Written, Error> {
        let (stored, cluster_id) = (checkpoint.clone(), cluster_id.to_owned());
        let rows =
            self.call(move |world| Ok(u64::from(world.confirm(epoch, &stored, &cluster_id))));
        let rows = rows.await?;
        self.written(rows, epoch, checkpoint.seq).await
    }

    async fn release(&mut self, epoch: i64) -> Result<Written, Error> {
        let rows = self.call(move |world| {
            let mine = world.tables.renew(epoch);
            if mine {
                world.tables.mark.owner = None;
                world.count("leases given back");
            }
            Ok(u64::from(mine))
        });
        let rows = rows.await?;
        self.written(rows, epoch, 0).await
    }

    async fn clean_up(
        &mut self,
        epoch: i64,
        retention: Duration,
        limit: usize,
    ) -> Result<(Written, u64), Error> {
        self.call(move |world| Ok(world.clean_up(epoch, retention, limit)))
            .await
    }

    async fn raise_format(&mut self, format: u32) -> Result<(), Error> {
        self.call(move |world| {
            let mark = &mut world.tables.mark;
            mark.format = mark.format.max(format);
            Ok(())
        })
        .await
    }

    async fn rewrite(&mut self, epoch: i64, rewrite: &Rewrite) -> Result<Written, Error> {
        let new = rewrite.clone();
        let rows = self.call(move |world| {
            let mark = &mut world.tables.mark;
            if mark.epoch != epoch {
                return Ok(0);
            }
            (mark.seq, mark.epoch) = (new.checkpoint.seq, new.checkpoint.epoch);
            mark.position = new.checkpoint.encode();
            mark.cluster_id = Some(new.cluster_id);
            mark.source_epoch = new.source_epoch;
            (mark.source, mark.owner) = (Some(new.source), None);
            mark.renewal += 1;
            Ok(1)
        });
        let rows = rows.await?;
        self.written(rows, epoch, i64::MAX).await
    }
}

impl ParkingSession for FakeSession {
    async fn overview(&mut self) -> Result<Overview, Error> {
        // Three statements, each with a snapshot of its own.
        let parked = self.call(|world| {
            let mut parked: BTreeMap<&str, i64> = BTreeMap::new();
            for row in world.tables.parked.values() {
                *parked.entry(row.stored.topic()).or_default() += 1;
            }
            let owned = parked.into_iter().map(|(topic, n)| (topic.to_owned(), n));
            Ok(owned.collect())
        });
        let parked = parked.await?;
        let requests = self.call(|world| {
            let mut all = world.tables.parked.values();
            Ok(all.any(|row| row.request.is_some()))
        });
        let requests = requests.await?;
        let paused = self.call(|world| Ok(world.tables.paused.clone())).await?;
        Ok(Overview {
            parked,
            requests,
            paused,
        })
    }

    async fn parked_among(&mut self, rows: &[Row]) -> Result<Among, Error> {
        let low = rows.iter().map(|row| row.id).min().unwrap();
        let high = rows.iter().map(|row| row.id).max().unwrap();
        let ids = self.call(move |world| {
            let among = world.tables.parked.range(low..=high);
            let ids: HashMap<_, _> = among
                .map(|(id, row)| (*id, row.stored.message_id))
                .collect();
            Ok(ids)
        });
        let ids = ids.await?;
        let keys = keys_of(rows);
        let first = self.call(move |world| {
            let first = |(topic, key): &(Arc<str>, Bytes)| {
                let mut all = world.tables.parked.iter();
                let found = all.find(|(_, row)| {
                    row.stored.topic() == &**topic
                        && row.stored.key().is_some_and(|k| k.as_bytes() == &**key)
                });
                found.map(|(id, _)| *id)
            };
            let found = keys.into_iter().filter_map(|key| {
                let id = first(&key)?;
                Some((key, id))
            });
            Ok(found.collect())
        });
        Ok(Among {
            ids,
            first: first.await?,
        })
    }

    async fn park(&mut self, epoch: i64, rows: &[Parking]) -> Result<Written, Error> {
        let rows = rows.to_vec();
        self.lead(epoch, move |world| world.park(&rows)).await
    }

    async fn pause(&mut self, epoch: i64, topic: &str, reason: &str) -> Result<Written, Error> {
        let (topic, reason) = (topic.to_owned(), reason.to_owned());
        self.lead(epoch, move |world| {
            let paused = &mut world.tables.paused;
            let known = paused
                .iter_mut()
                .find(|p| p.topic == topic && p.key.is_none());
            match known {
                Some(known) if known.by_relay => known.reason = reason,
                Some(_) => {}
                None => {
                    paused.push(Paused {
                        topic,
                        key: None,
                        by_relay: true,
                        reason,
                    });
                    world.count("topics paused");
                }
            }
            Ok(())
        })
        .await
    }

    async fn releasable(
        &mut self,
        high: i64,
        limit: Limit,
        probe: Option<&str>,
    ) -> Result<Vec<ParkedRow>, Error> {
        let probe = probe.map(str::to_owned);
        self.call(move |world| Ok(world.tables.releasable(high, limit, probe.as_deref())))
            .await
    }

    async fn refuse(&mut self, epoch: i64, id: i64, reason: &str) -> Result<Written, Error> {
        let reason = reason.to_owned();
        self.lead(epoch, move |world| {
            if let Some(row) = world.tables.parked.get_mut(&id) {
                (row.cause, row.reason, row.request) = (Cause::Refused, reason, None);
                row.attempts += 1;
                row.ever_refused = true;
                world.history.decided.remove(&id);
                world.note(format_args!("refused again: {id}"));
                world.count("refused again");
            }
            Ok(())
        })
        .await
    }

    async fn finish_release(
        &mut self,
        epoch: i64,
        checkpoint: &Checkpoint,
        cluster_id: &str,
    ) -> Result<Written, Error> {
        let (stored, cluster_id) = (checkpoint.clone(), cluster_id.to_owned());
        self.lead(epoch, move |world| {
            world.confirm(epoch, &stored, &cluster_id);
            let kept = |id: &i64, _: &mut Parked| !stored.released.contains(*id);
            world.tables.parked.retain(kept);
            world.note(format_args!("unpark {}", stored.released));
            Ok(())
        })
        .await
    }

    async fn resume_topic(&mut self, epoch: i64, topic: &str) -> Result<Written, Error> {
        let topic = topic.to_owned();
        self.lead(epoch, move |world| {
            let over = |p: &Paused| p.topic == topic && p.key.is_none() && p.by_relay;
            world.tables.paused.retain(|p| !over(p));
            world.count("topics resumed");
            Ok(())
        })
        .await
    }

    async fn list_parked(&mut self, _: &Filter, limit: usize) -> Result<Vec<ParkedRow>, Error> {
        self.call(move |world| {
            let rows = world.tables.parked.iter().take(limit);
            Ok(rows.map(|(id, row)| row.parked_row(*id)).collect())
        })
        .await
    }

    async fn request(&mut self, ids: &[i64], request: Request) -> Result<u64, Error> {
        let ids = ids.to_vec();
        self.call(move |world| {
            ids.iter().for_each(|id| world.decide(*id, request));
            Ok(ids.len() as u64)
        })
        .await
    }

    async fn pause_for_operator(
        &mut self,
        topic: &str,
        key: Option<&[u8]>,
        reason: &str,
    ) -> Result<bool, Error> {
        let wanted = Paused {
            topic: topic.to_owned(),
            key: key.map(Bytes::copy_from_slice),
            by_relay: false,
            reason: reason.to_owned(),
        };
        self.call(move |world| {
            let paused = &mut world.tables.paused;
            let known = paused.len();
            paused.retain(|p| (&p.topic, &p.key) != (&wanted.topic, &wanted.key));
            let new = paused.len() == known;
            paused.push(wanted);
            Ok(new)
        })
        .await
    }

    async fn resume_for_operator(
        &mut self,
        topic: &str,
        key: Option<&[u8]>,
    ) -> Result<bool, Error> {
        let (topic, key) = (topic.to_owned(), key.map(Bytes::copy_from_slice));
        self.call(move |world| {
            let known = world.tables.paused.len();
            world
                .tables
                .paused
                .retain(|p| p.topic != topic || p.key != key);
            Ok(world.tables.paused.len() < known)
        })
        .await
    }
}
