//! `/live`, `/ready` and `/metrics`.
//!
//! Ready means progress: a relay that is up but stuck is not ready, whatever its sockets say.

use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use oncebox_relay::{Health, Role, Snapshot};
use serde::Serialize;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::exit::Failure;

/// How often the recorder drains its histograms, as its manual asks for.
const UPKEEP: Duration = Duration::from_secs(5);

#[derive(Clone)]
struct Shared {
    health: Health,
    within: Duration,
    metrics: PrometheusHandle,
}

/// Serves until `shutdown`. Installs the process's metrics recorder, so call it before the relay starts.
///
/// # Errors
/// The address cannot be bound, or a metrics recorder exists already.
pub async fn serve(
    address: SocketAddr,
    health: Health,
    ready_within: Duration,
    shutdown: CancellationToken,
) -> Result<(SocketAddr, JoinHandle<()>), Failure> {
    let recorder = PrometheusBuilder::new().build_recorder();
    let metrics = recorder.handle();
    metrics::set_global_recorder(recorder).map_err(Failure::error)?;
    let listener = TcpListener::bind(address).await.map_err(|e| {
        Failure::error(format!(
            "cannot serve http on {address}: {e}; choose another --http"
        ))
    })?;
    let bound = listener.local_addr().map_err(Failure::error)?;
    let upkeep = metrics.clone();
    let app = router(Shared {
        health,
        within: ready_within,
        metrics,
    });
    let task = tokio::spawn(async move {
        let stopped = shutdown.clone();
        let upkeep = async {
            loop {
                tokio::time::sleep(UPKEEP).await;
                upkeep.run_upkeep();
            }
        };
        let server = axum::serve(listener, app)
            .with_graceful_shutdown(async move { stopped.cancelled().await });
        tokio::select! {
            result = server.into_future() => if let Err(error) = result {
                tracing::warn!(%error, "http server ended");
            },
            () = upkeep => {}
            // A slow reader of /metrics must not hold the process.
            () = async { shutdown.cancelled().await; tokio::time::sleep(Duration::from_secs(1)).await } => {}
        }
    });
    Ok((bound, task))
}

fn router(shared: Shared) -> Router {
    Router::new()
        .route("/live", get(|| async { "live\n" }))
        .route("/ready", get(ready))
        .route("/metrics", get(metrics_text))
        .with_state(shared)
}

async fn ready(State(shared): State<Shared>) -> impl IntoResponse {
    let body = Readiness::of(&shared.health.snapshot(), shared.within);
    let status = if body.ready {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    let json = serde_json::to_string(&body).unwrap_or_default();
    (
        status,
        [(header::CONTENT_TYPE, "application/json")],
        json + "\n",
    )
}

async fn metrics_text(State(shared): State<Shared>) -> impl IntoResponse {
    // The snapshot refreshes the gauge of the lag in seconds, which grows while nothing happens.
    let _ = shared.health.snapshot();
    (
        [(header::CONTENT_TYPE, "text/plain; version=0.0.4")],
        shared.metrics.render(),
    )
}

/// The body of `/ready`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Readiness {
    /// Whether the relay made progress lately.
    pub ready: bool,
    /// `starting`, `standby`, `leader` or `stopped`.
    pub role: &'static str,
    /// Why it is not ready.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Seconds since the last progress.
    pub last_progress_seconds: Option<f64>,
    /// Messages that wait, at most.
    pub lag_messages: u64,
    /// The age of the oldest message that waits.
    pub lag_seconds: f64,
    /// Messages that this process published.
    pub published: u64,
    /// Id intervals that open transactions may still fill.
    pub gaps: usize,
    /// Messages that are parked; `oncebox relay park list` says why.
    pub parked: u64,
    /// Topics that are paused, or have paused keys.
    pub paused: Vec<String>,
    /// Why the position is held back, when it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub holding: Option<String>,
    /// The last error, if nothing was published since.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
}

impl Readiness {
    /// Judges a snapshot: progress within `within`, as leader or standby.
    pub fn of(snapshot: &Snapshot, within: Duration) -> Self {
        let progressed = snapshot.last_progress.is_some_and(|ago| ago <= within);
        let working = matches!(snapshot.role, Role::Leader | Role::Standby);
        let reason = match (working, progressed, snapshot.last_progress) {
            (true, true, _) => None,
            (false, ..) => Some(format!("the relay is {}", snapshot.role.as_str())),
            (true, false, None) => Some("no progress yet".to_owned()),
            (true, false, Some(ago)) => Some(format!("no progress for {:.1} s", ago.as_secs_f64())),
        };
        let error = snapshot.last_error.as_deref().map(crate::redact::scrub);
        Self {
            ready: reason.is_none(),
            role: snapshot.role.as_str(),
            reason: reason.map(|r| match &error {
                Some(error) => format!("{r}: {error}"),
                None => r,
            }),
            last_progress_seconds: snapshot.last_progress.map(|ago| ago.as_secs_f64()),
            lag_messages: snapshot.lag_messages,
            lag_seconds: snapshot.lag_seconds,
            published: snapshot.published,
            gaps: snapshot.gaps,
            parked: snapshot.parked,
            paused: snapshot.paused.clone(),
            holding: snapshot.holding.clone(),
            last_error: error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(role: Role, ago: Option<u64>) -> Snapshot {
        Snapshot {
            role,
            last_progress: ago.map(Duration::from_secs),
            ..Snapshot::default()
        }
    }

    #[test]
    fn ready_means_progress() {
        let within = Duration::from_secs(15);
        for (role, ago, ready) in [
            (Role::Leader, Some(1), true),
            (Role::Standby, Some(14), true),
            (Role::Leader, Some(16), false),
            (Role::Standby, None, false),
            (Role::Starting, Some(1), false),
            (Role::Stopped, Some(1), false),
        ] {
            let body = Readiness::of(&snapshot(role, ago), within);
            assert_eq!(body.ready, ready, "{role:?} {ago:?}");
            assert_eq!(body.reason.is_none(), ready, "{body:?}");
        }
    }

    #[test]
    fn the_reason_names_the_last_error() {
        let mut stuck = snapshot(Role::Starting, None);
        stuck.last_error = Some("the database is not available".into());
        let body = Readiness::of(&stuck, Duration::from_secs(1));
        assert_eq!(
            body.reason.unwrap(),
            "the relay is starting: the database is not available"
        );
    }

    #[tokio::test]
    async fn the_three_paths_answer() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};

        let shutdown = CancellationToken::new();
        let within = Duration::from_secs(1);
        let (address, task) = serve(
            ([127, 0, 0, 1], 0).into(),
            Health::new(),
            within,
            shutdown.clone(),
        )
        .await
        .unwrap();
        metrics::counter!("oncebox_relay_published_total").increment(3);
        let ask = async |path: &str| {
            let mut socket = tokio::net::TcpStream::connect(address).await.unwrap();
            let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
            socket.write_all(request.as_bytes()).await.unwrap();
            let mut answer = String::new();
            socket.read_to_string(&mut answer).await.unwrap();
            answer
        };
        assert!(ask("/live").await.starts_with("HTTP/1.1 200"));
        let ready = ask("/ready").await;
        assert!(
            ready.starts_with("HTTP/1.1 503") && ready.contains("\"role\":\"starting\""),
            "{ready}"
        );
        assert!(
            ask("/metrics")
                .await
                .contains("oncebox_relay_published_total 3")
        );
        shutdown.cancel();
        task.await.unwrap();
    }
}
