//! Stock taken in advance: a count in Redis in front of the database's own.

use std::sync::LazyLock;
use std::time::Duration;

use redis::{Script, ScriptInvocation};

use crate::Error;
use crate::gate::millis;
use crate::link::Redis;

/// The largest stock: Redis' scripts count exactly up to 2^53.
const LARGEST: u64 = 1_000_000_000_000_000;

/// What every script begins with: gives back what was forgotten, and forgets what ended long ago, some of each per call.
///
/// KEYS: `available` (a number, may be below 0 after a reconciliation), `entries` (hash: reservation → `<state>:<n>` with
/// state H = held, C = confirmed, R = released, X = expired), `due` (sorted set: held reservations by their end), `ended`
/// (sorted set: the others by when they are forgotten). ARGV[1]: how long an ended one is remembered, in milliseconds.
const PRELUDE: &str = r"
local available, entries, due, ended = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function entry(id)
  local found = redis.call('HGET', entries, id)
  if found then return string.match(found, '^(%a):(%d+)$') end
end
local function finish(id, state, n)
  redis.call('HSET', entries, id, state .. ':' .. n)
  redis.call('ZREM', due, id)
  redis.call('ZADD', ended, now + ARGV[1], id)
  if state ~= 'C' and redis.call('EXISTS', available) == 1 then
    redis.call('INCRBY', available, n)
  end
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', due, '-inf', now, 'LIMIT', 0, 100)) do
  local state, n = entry(id)
  if state == 'H' then finish(id, 'X', n) else redis.call('ZREM', due, id) end
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', ended, '-inf', now, 'LIMIT', 0, 100)) do
  redis.call('HDEL', entries, id)
  redis.call('ZREM', ended, id)
end
";

/// ARGV: reservation, n, how long it is held in milliseconds. Answers the state and a number.
static RESERVE: LazyLock<Script> = LazyLock::new(|| {
    script(
        r"
local id, n = ARGV[2], ARGV[3]
local state, had = entry(id)
if state then
  if had ~= n then return {'other', had} end
  return {state, had}
end
local left = redis.call('GET', available)
if not left then return {'unknown', '0'} end
if tonumber(left) < tonumber(n) then return {'short', left} end
redis.call('DECRBY', available, n)
redis.call('HSET', entries, id, 'H:' .. n)
redis.call('ZADD', due, now + ARGV[4], id)
return {'H', n}
",
    )
});

/// ARGV: reservation, the state to end in. Answers the state it is in now, or nothing.
static END: LazyLock<Script> = LazyLock::new(|| {
    script(
        r"
local id = ARGV[2]
local state, n = entry(id)
if state ~= 'H' then return state or '' end
finish(id, ARGV[3], n)
return ARGV[3]
",
    )
});

/// ARGV: the database's stock. Answers what is available now, and what is held.
static RECONCILE: LazyLock<Script> = LazyLock::new(|| {
    script(
        r"
local open = 0
for _, id in ipairs(redis.call('ZRANGE', due, 0, -1)) do
  local state, n = entry(id)
  if state == 'H' then open = open + n end
end
redis.call('SET', available, ARGV[2])
return {redis.call('DECRBY', available, string.format('%.0f', open)), open}
",
    )
});

static AVAILABLE: LazyLock<Script> =
    LazyLock::new(|| script("return redis.call('GET', available)"));

fn script(body: &str) -> Script {
    Script::new(&format!("{PRELUDE}{body}"))
}

/// How long reservations are held and remembered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReserveConfig {
    /// A reservation that is neither confirmed nor released for so long was forgotten: its stock is given back. Longer than
    /// the longest way from reserve to confirm, retries included. Defaults to 15 minutes.
    pub hold: Duration,
    /// How long an ended reservation is remembered, so that a late repetition of a call changes nothing. Not shorter than the
    /// retry horizon. Defaults to 7 days.
    pub remember: Duration,
}

impl Default for ReserveConfig {
    fn default() -> Self {
        Self {
            hold: Duration::from_secs(15 * 60),
            remember: Duration::from_secs(7 * 86_400),
        }
    }
}

/// What became of a call of [`Reserve::reserve`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reservation {
    /// It is held: by this call, or by an earlier one with the same id.
    Held,
    /// There is not enough. Nothing was changed, and nothing is remembered: asked again, it is decided anew.
    NotEnough {
        /// What there is.
        available: u64,
    },
    /// Redis does not know this stock: it was never reconciled, or Redis lost it. Ask the database, and
    /// [`reconcile`](Reserve::reconcile).
    UnknownStock,
    /// This reservation was held, and has ended. Nothing was changed.
    Ended(End),
    /// This reservation was made for another number. Nothing was changed.
    OtherNumber {
        /// The number it was made for.
        reserved: u32,
    },
}

/// How a reservation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Confirmed: the stock is gone.
    Confirmed,
    /// Released: the stock was given back.
    Released,
    /// Forgotten for [`ReserveConfig::hold`]: the stock was given back.
    Expired,
}

/// What became of a call of [`Reserve::release`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Release {
    /// Its stock was given back, once: by this call, or by an earlier one.
    Released,
    /// Its stock was given back before, because it was forgotten.
    Expired,
    /// It was confirmed. Nothing was changed: give the stock back in the database, and reconcile.
    Confirmed,
    /// Redis does not know it. Nothing was changed.
    Unknown,
}

/// What became of a call of [`Reserve::confirm`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Confirmation {
    /// It is confirmed: by this call, or by an earlier one.
    Confirmed,
    /// It was forgotten, and its stock given back: until the next reconciliation Redis believes in more than there is.
    Expired,
    /// It was released: as [`Expired`](Self::Expired).
    Released,
    /// Redis does not know it. Nothing was changed.
    Unknown,
}

/// What Redis believes after a reconciliation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reconciled {
    /// The database's stock without what is held. Below 0 when more is held than there is: nothing is reserved until enough was
    /// released, or bought.
    pub available: i64,
    /// What is held.
    pub held: u64,
}

/// Takes stock in advance in Redis, in one script per call, so that of a rush only those reach the database who can get
/// something.
///
/// `reserve` → the business transaction with the database's own condition (`UPDATE … SET stock = stock - n WHERE stock >= n`)
/// → `confirm` after its commit, or `release` when it failed. Each call may be repeated with the same reservation id: it takes
/// effect once. The id may be the message's or the order's; for an order of several kinds of goods use one id for all of them,
/// for a reservation belongs to one stock.
///
/// **Redis believes, the database knows.** What Redis loses, or a crash between two of the steps leaves behind, is corrected by
/// the expiry of forgotten reservations and by [`reconcile`](Self::reconcile), regularly and after
/// [`UnknownStock`](Reservation::UnknownStock); what it believes too much is refused by the database. Give Redis an eviction
/// policy that spares keys without expiry (`noeviction`, `volatile-…`).
///
/// ```no_run
/// # async fn example(redis: oncebox_gate::Redis, order: &str) -> Result<(), oncebox_gate::Error> {
/// use oncebox_gate::{Reservation, Reserve, ReserveConfig};
///
/// let reserve = Reserve::new(redis, ReserveConfig::default())?;
/// match reserve.reserve("sku-1", 2, order).await? {
///     Reservation::Held => {
///         // BEGIN; UPDATE … WHERE stock >= 2; outbox.enqueue(…); COMMIT
///         reserve.confirm("sku-1", order).await?;
///     }
///     Reservation::NotEnough { .. } => { /* sold out: the database is not asked */ }
///     _ => { /* the database decides */ }
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Reserve {
    redis: Redis,
    hold: u64,
    remember: u64,
}

impl Reserve {
    /// Checks the settings; asks Redis for nothing.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`].
    pub fn new(redis: Redis, config: ReserveConfig) -> Result<Self, Error> {
        let ReserveConfig { hold, remember } = config;
        for (name, value) in [("hold", hold), ("remember", remember)] {
            if value < Duration::from_millis(1) {
                return Err(Error::invalid(name, value, "at least 1 ms"));
            }
        }
        Ok(Self {
            redis,
            hold: millis(hold),
            remember: millis(remember),
        })
    }

    /// Holds `n` (at least 1) of this stock under the reservation's id, if there is enough. While it is held, a repeated call
    /// answers the same and takes nothing more.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`], or [`Error::Unavailable`] when Redis does not answer: go on with the database alone, or repeat the
    /// call; it may have been done.
    ///
    /// # Cancel safety
    ///
    /// When the future is dropped, the reservation may be held or not: repeat the call, release it, or let it expire.
    pub async fn reserve(
        &self,
        stock: &str,
        n: u32,
        reservation: &str,
    ) -> Result<Reservation, Error> {
        if n == 0 {
            return Err(Error::invalid("n", n, "at least 1"));
        }
        let mut script = self.script(&RESERVE, stock);
        script.arg(reservation).arg(n).arg(self.hold);
        let (state, number): (String, i64) = self.run(&script, "reserve").await?;
        Ok(match state.as_str() {
            "H" => Reservation::Held,
            "C" => Reservation::Ended(End::Confirmed),
            "R" => Reservation::Ended(End::Released),
            "X" => Reservation::Ended(End::Expired),
            "other" => Reservation::OtherNumber {
                reserved: u32::try_from(number).unwrap_or(u32::MAX),
            },
            "short" => Reservation::NotEnough {
                available: u64::try_from(number).unwrap_or(0),
            },
            _ => Reservation::UnknownStock,
        })
    }

    /// Gives a held reservation's stock back, once however often it is called.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`]: repeat the call, or let the reservation expire.
    ///
    /// # Cancel safety
    ///
    /// When the future is dropped, it may be released or not: repeat the call, or let it expire.
    pub async fn release(&self, stock: &str, reservation: &str) -> Result<Release, Error> {
        Ok(match self.end(stock, reservation, "R", "release").await? {
            Some(End::Released) => Release::Released,
            Some(End::Expired) => Release::Expired,
            Some(End::Confirmed) => Release::Confirmed,
            None => Release::Unknown,
        })
    }

    /// The database has taken the stock: the reservation has done its work. Call it after the `COMMIT`.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`]: repeat the call, or leave it to the next reconciliation.
    ///
    /// # Cancel safety
    ///
    /// When the future is dropped, it may be confirmed or not: repeat the call.
    pub async fn confirm(&self, stock: &str, reservation: &str) -> Result<Confirmation, Error> {
        Ok(match self.end(stock, reservation, "C", "confirm").await? {
            Some(End::Confirmed) => Confirmation::Confirmed,
            Some(End::Expired) => Confirmation::Expired,
            Some(End::Released) => Confirmation::Released,
            None => Confirmation::Unknown,
        })
    }

    /// Sets what Redis believes: what the database has (at most 10^15) without the reservations that are held.
    ///
    /// Which of the held ones the database has already subtracted nobody knows: those count twice, so that Redis believes in
    /// less rather than more. A confirmation between reading the database and this call is the exception. The next
    /// reconciliation corrects both.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] or [`Error::Unavailable`].
    ///
    /// # Cancel safety
    ///
    /// When the future is dropped, it may be done or not: repeat the call with the stock of then.
    pub async fn reconcile(&self, stock: &str, database_stock: u64) -> Result<Reconciled, Error> {
        if database_stock > LARGEST {
            let rule = "at most 10^15";
            return Err(Error::invalid("database_stock", database_stock, rule));
        }
        let mut script = self.script(&RECONCILE, stock);
        script.arg(database_stock);
        let (available, held) = self.run(&script, "reconcile").await?;
        Ok(Reconciled { available, held })
    }

    /// What Redis believes is there for new reservations; `None` = it does not know this stock.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`].
    ///
    /// # Cancel safety
    ///
    /// The future may be dropped at any time.
    pub async fn available(&self, stock: &str) -> Result<Option<i64>, Error> {
        let script = self.script(&AVAILABLE, stock);
        self.run(&script, "read the stock").await
    }

    async fn end(
        &self,
        stock: &str,
        reservation: &str,
        state: &str,
        doing: &'static str,
    ) -> Result<Option<End>, Error> {
        let mut script = self.script(&END, stock);
        script.arg(reservation).arg(state);
        let state: String = self.run(&script, doing).await?;
        Ok(match state.as_str() {
            "C" => Some(End::Confirmed),
            "R" => Some(End::Released),
            "X" => Some(End::Expired),
            _ => None,
        })
    }

    fn script<'a>(&self, script: &'a Script, stock: &str) -> ScriptInvocation<'a> {
        let keys = ["available", "entries", "due", "ended"];
        let mut script = script.prepare_invoke();
        for kind in keys {
            script.key(self.redis.key("stock", &[stock, kind]));
        }
        script.arg(self.remember);
        script
    }

    async fn run<T: redis::FromRedisValue + Send>(
        &self,
        script: &ScriptInvocation<'_>,
        doing: &'static str,
    ) -> Result<T, Error> {
        let answer = self.redis.script(script, self.redis.request_timeout());
        answer.await.map_err(Error::unavailable(doing))
    }
}
