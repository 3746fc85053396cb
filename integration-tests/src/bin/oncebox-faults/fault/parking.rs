//! Records that Kafka refuses, and topics that are paused.

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use oncebox_integration_tests::history::History;
use oncebox_relay::Step;
use rand::RngExt as _;
use rand::rngs::StdRng;

use super::PATIENCE;
use crate::crew::{self, signal};
use crate::scene::{self, RECOVERY, Scene};
use crate::workload::{self, LARGE};

impl Scene {
    /// The topic refuses the large records of the workload until relays have parked some; one kills itself at a step of
    /// that, or of the release that an operator then asks for.
    pub(super) async fn kill_while_parking(
        &mut self,
        step: Step,
        rng: &mut StdRng,
    ) -> Result<bool> {
        let limit = (LARGE / 2).to_string();
        let refuse = [("max.message.bytes", &*limit)];
        self.kafka.set_topic(&self.topic, &refuse).await;
        let arm = ["--kill-at".to_owned(), format!("{step}:1")];
        let hit = if step == Step::Parked {
            let died = self.relays.run_armed(&arm, PATIENCE).await;
            self.kafka.set_topic(&self.topic, &[]).await;
            died
        } else {
            let refused = self.refuses().await?;
            if refused {
                // A relay that was not armed must not release.
                self.relays.arm(&arm);
            }
            self.kafka.set_topic(&self.topic, &[]).await;
            if refused {
                self.operator("park requeue", &["--cause", "refused", "--apply"])
                    .await?;
            }
            refused && self.relays.one_died(PATIENCE).await
        };
        if rng.random_bool(0.3) {
            signal(self.leader().await?, "KILL");
        }
        let deadline = Instant::now() + 2 * RECOVERY;
        while !self.nothing_parked_within(Duration::from_secs(3)).await? {
            if Instant::now() > deadline {
                bail!("what was parked is not released; {}", self.relays.log_end());
            }
            // What was refused after the operator had asked.
            let again = ["--cause", "refused", "--apply"];
            let _ = self.operator("park requeue", &again).await;
        }
        Ok(hit)
    }

    pub(super) async fn pause_topic(&mut self, rng: &mut StdRng) -> Result<bool> {
        let topic = self.topic.clone();
        self.operator("pause", &["--topic", &topic, "--reason", "a fault"])
            .await?;
        let hit = self.parks().await?;
        tokio::time::sleep(Duration::from_millis(rng.random_range(0..500))).await;
        if rng.random_bool(0.5) {
            signal(self.leader().await?, "KILL");
        }
        self.operator("resume", &["--topic", &topic]).await?;
        ensure!(
            self.nothing_parked().await?,
            "the topic goes on and its messages still wait; {}",
            self.relays.log_end()
        );
        Ok(hit)
    }

    /// Hits when the messages of the missing topic are parked while others are published.
    pub(super) async fn missing_topic(&mut self, rng: &mut StdRng) -> Result<bool> {
        let topic = format!("late-{}", uuid::Uuid::new_v4().simple());
        let messages = rng.random_range(2..20);
        let committed = workload::commit(&self.database, &topic, 1, messages).await?;
        let hit = self.parks().await?;
        let before = self.watch.seq().await?;
        self.recovered().await?;
        let others_go_on = self.watch.seq().await? > before;
        if rng.random_bool(0.5) {
            signal(self.leader().await?, "KILL");
        }
        self.kafka.create_topic_named(&topic, 2).await;
        ensure!(
            self.nothing_parked().await?,
            "the topic is there and its messages still wait; {}",
            self.relays.log_end()
        );
        self.apart.push(History {
            committed,
            published: scene::published(&self.kafka, &topic).await?,
            ..History::default()
        });
        Ok(hit && others_go_on)
    }

    /// Waits until something is parked.
    pub(super) async fn parks(&self) -> Result<bool> {
        self.parked_within(|(all, _)| all > 0).await
    }

    async fn refuses(&self) -> Result<bool> {
        self.parked_within(|(_, refused)| refused > 0).await
    }

    async fn parked_within(&self, enough: impl Fn((i64, i64)) -> bool) -> Result<bool> {
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            if let Ok(parked) = self.watch.parked().await
                && enough(parked)
            {
                return Ok(true);
            }
            tokio::time::sleep(Duration::from_millis(30)).await;
        }
        Ok(false)
    }

    /// Whether the last parked row is gone in time. Counts what was parked.
    pub(super) async fn nothing_parked(&mut self) -> Result<bool> {
        self.nothing_parked_within(RECOVERY).await
    }

    async fn nothing_parked_within(&mut self, patience: Duration) -> Result<bool> {
        let deadline = Instant::now() + patience;
        let mut most = 0;
        loop {
            let parked = self.watch.parked().await;
            if let Ok((all, _)) = parked {
                most = all.max(most);
            }
            if matches!(parked, Ok((0, _))) {
                self.parked += usize::try_from(most)?;
                return Ok(true);
            }
            if Instant::now() > deadline {
                return Ok(false);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// `oncebox relay …` as an operator types it.
    async fn operator(&self, command: &str, more: &[&str]) -> Result<()> {
        let url = [("--database-url", self.database.url())];
        let mut all = scene::words(&format!("relay {command}"), &url);
        all.extend(more.iter().map(|&word| word.to_owned()));
        crew::run(&all, &self.log("operator.log")).await
    }
}
